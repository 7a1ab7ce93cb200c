"""Processes of a cluster: TensorFlow's servers and their collectives."""
