"""Rules of row placements, by kinds of operations."""
