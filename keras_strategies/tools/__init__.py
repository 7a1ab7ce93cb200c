"""The command `keras-strategies`: `launch` and `doctor`."""
