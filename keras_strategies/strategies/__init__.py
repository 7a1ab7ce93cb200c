"""Public strategies: one file each, which only chooses its parts."""
