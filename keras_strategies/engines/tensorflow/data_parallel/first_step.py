"""Options of the graph optimizer that shorten the first step of a program.

A program of two replicas has twice the operations of a program for one device. Most of
its first run is TensorFlow's graph optimizer (Grappler): its time grows with them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from keras_strategies.engines.tensorflow.compat.programs import program_config
from keras_strategies.runtime.placement import Placement

# Options of the graph optimizer in place of its defaults, on CPUs:
# - one iteration: a second one removes only a few more operations;
# - no layout optimizer: it analyzes all shapes, but converts layouts on GPUs only;
# - no memory optimizer: it swaps tensors of GPUs, and splits sums of many tensors where
#   a device's memory is nearly full.
_ON_CPUS = {
    "meta_optimizer_iterations": RewriterConfig.ONE,
    "layout_optimizer": RewriterConfig.OFF,
    "memory_optimization": RewriterConfig.NO_MEM_OPT,
}


def optimizer_options(
    placement: Placement,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A factory of contexts in which the programs of a strategy are called.

    Options that the user has set with `tf.config.optimizer` are not changed.
    """
    devices = {placement.variables, *placement.replicas}
    if any(device.kind != "cpu" for device in devices):
        return contextlib.nullcontext
    return functools.partial(program_config, set_options)


def set_options(config: Any) -> None:
    """Replaces defaults in a `ConfigProto`."""
    options = config.graph_options.rewrite_options
    for name, value in _ON_CPUS.items():
        if not getattr(options, name):
            setattr(options, name, value)
