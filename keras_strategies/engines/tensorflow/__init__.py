"""TensorFlow: replicas are branches of one graph, traced in lockstep."""

from keras_strategies.engines.tensorflow.engine import TensorFlowEngine

__all__ = ["TensorFlowEngine"]
