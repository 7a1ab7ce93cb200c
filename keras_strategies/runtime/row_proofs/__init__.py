"""Proofs, from its operations, that a layer call can be split by rows."""
