"""Rows of Torch's loaders, which each engine reads."""
