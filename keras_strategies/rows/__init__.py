"""Rows of calls: which calls can be split by rows, proved on Keras's operations."""
