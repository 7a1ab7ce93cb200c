"""Batches of which each worker reads its own rows."""
