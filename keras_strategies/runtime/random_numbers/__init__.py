"""Random numbers of rows: which draws have rows, and those of a replica."""
