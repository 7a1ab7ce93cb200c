"""Draws with the entries of a replica's rows, and the global generators."""
