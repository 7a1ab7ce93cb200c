"""Torch: replicas are threads, each with its own copies of the variables."""
