"""Processes of a cluster: JAX's coordination service and host collectives."""
