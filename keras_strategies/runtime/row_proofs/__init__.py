"""Proofs that a layer call can be split by rows, by its operations and not by values."""
