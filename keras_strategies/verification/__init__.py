"""Comparison of training under a strategy with training on one device."""
