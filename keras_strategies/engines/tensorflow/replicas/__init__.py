"""Replicas of `Strategy.run`, and their variables."""
