"""What is particular to Keras on one backend."""
