"""The workers of a running cluster: they meet, agree, and watch one another.

The engines (XLA, Gloo, NCCL, TensorFlow's collectives) move tensors. What they do not
say is who is missing, who is silent and how far it had come; and each begins in its own
way. So workers first meet at a small hub in the chief's process, the same on every
backend, over messages of `multiprocessing.connection`. There they learn one another's
addresses, from which the engine is started, compare what has to be the same, and keep
telling that they are alive. No tensor of a step goes this way.
"""

from keras_strategies.cluster.group.worker_group import Loss, WorkerGroup, current_group

__all__ = ["Loss", "WorkerGroup", "current_group"]
