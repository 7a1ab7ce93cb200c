"""Checks whether a layer call can be split by rows."""
