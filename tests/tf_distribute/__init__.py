"""The same code under `tf.distribute` and under this package."""
