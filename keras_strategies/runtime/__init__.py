"""Execution of replicas, independent of the framework."""
