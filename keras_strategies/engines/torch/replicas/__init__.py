"""Replicas as threads of one process: variables, random numbers, collectives, `run`."""
