"""Strategies: one file each, which only chooses its parts."""
