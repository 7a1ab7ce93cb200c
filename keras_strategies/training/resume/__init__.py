"""Resuming `fit` after the loss of all processes."""
