"""JAX: `fit` is the global view, one compiled program over a mesh of devices."""
