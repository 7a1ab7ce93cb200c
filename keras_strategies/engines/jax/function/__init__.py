"""`ks.function`: compiled programs with Keras state threaded through."""
