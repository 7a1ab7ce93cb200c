"""Layer calls that run as recorded operations, without Keras's Python code."""
