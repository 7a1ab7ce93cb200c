"""Variables and Keras objects: numbers, placement, sharding, pickling."""
