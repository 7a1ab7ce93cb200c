"""Layers.

>>> table = ks.layers.GrowingEmbedding(100_000, 16, admit=2)
"""

from keras_strategies.training.growing_embedding import GrowingEmbedding

__all__ = ["GrowingEmbedding"]


def __dir__() -> list[str]:
    return __all__
