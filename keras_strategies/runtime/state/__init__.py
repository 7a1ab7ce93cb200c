"""Values of variables: on replicas in `run` and in layer calls, and on workers."""
