"""Layer calls of `fit` split by rows over replicas and workers."""
