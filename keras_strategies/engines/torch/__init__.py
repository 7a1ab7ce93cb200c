"""Torch: replicas are threads, each with its own copies of the variables."""

from keras_strategies.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
