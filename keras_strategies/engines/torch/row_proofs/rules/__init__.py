"""Rules of row placements, by kinds of ATen operations."""
