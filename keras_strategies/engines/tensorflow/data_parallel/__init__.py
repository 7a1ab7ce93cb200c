"""Layer calls on all replicas, and the steps of a model around them."""
