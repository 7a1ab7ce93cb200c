"""TensorFlow: replicas are branches of one graph, traced in lockstep."""

from keras_strategies.engines.tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]
