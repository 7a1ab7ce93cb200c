"""TensorFlow: replicas are branches of one graph, traced in lockstep."""
