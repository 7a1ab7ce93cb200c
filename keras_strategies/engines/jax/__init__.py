"""JAX: `fit` is the global view, one compiled program over a mesh of devices."""

from keras_strategies.engines.jax.engine import JaxEngine

__all__ = ["JaxEngine"]
