"""Training that continues when workers are lost, return or join."""
