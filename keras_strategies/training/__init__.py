"""The hook into Keras models, and what layers need to be exact on replicas."""
