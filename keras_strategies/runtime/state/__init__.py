"""Values of variables in scopes: of replicas in `run` and in layer calls."""
