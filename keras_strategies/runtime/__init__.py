"""Execution of a strategy that does not depend on the framework below it."""
