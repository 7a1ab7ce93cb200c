"""Input: splitting global batches, datasets that are distributed."""
