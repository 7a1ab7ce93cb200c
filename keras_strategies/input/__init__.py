"""Input: sources of global batches, splitting, prefetch and distributed datasets."""
