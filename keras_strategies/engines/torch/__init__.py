"""Torch: replicas are threads, each with its own copies of the variables."""

from keras_strategies.engines.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
