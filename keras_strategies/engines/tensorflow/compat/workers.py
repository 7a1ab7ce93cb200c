"""Collectives of several workers."""

from __future__ import annotations

import logging
from typing import Any

from tensorflow.python.eager import context as eager_context

from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(f"{_PYTHON}.eager.context", ("context",), "The runtime of this process."),
    Private(
        f"{_PYTHON}.eager.context.Context",
        (
            "_collective_leader",
            "abort_collective_ops",
            "config",
            "configure_collective_ops",
            "enable_collective_ops",
            "ensure_initialized",
        ),
        "Collectives of workers.",
    ),
)


def runtime() -> Any:
    """TensorFlow's runtime in this process."""
    return eager_context.context()


def configure_collectives(leader: str, device_filter: str) -> None:
    """Configures collectives of several workers, before the runtime is started.

    Args:
        leader: str, the task that orders collectives.
        device_filter: str, the task with the devices that this process sees.

    Raises:
        RuntimeError: if the runtime is started.
    """
    runtime().configure_collective_ops(
        collective_leader=leader, device_filters=(device_filter,)
    )


def collective_configuration(leader: str) -> Any:
    """The `ConfigProto` of this process, with its virtual devices.

    TensorFlow 2.21: `configure_collective_ops` refuses another leader than the first.

    Args:
        leader: str, the task that orders collectives.
    """
    context = runtime()
    context._collective_leader = leader
    return context.config


def start_collectives(server: Any) -> None:
    """Starts the runtime with a server.

    Args:
        server: a `ServerDef`.

    Raises:
        tf.errors.OpError: if the server cannot start.
    """
    context = runtime()
    context.enable_collective_ops(server)
    context.ensure_initialized()


def replace_collectives(server: Any) -> None:
    """Connects the runtime's server to other servers; variables and programs stay.

    TensorFlow 2.21: `enable_collective_ops` warns that tensors may become unreadable.
    That concerns tensors on devices with other names only; the warning is suppressed.

    Args:
        server: a `ServerDef` with the same task for this process.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        runtime().enable_collective_ops(server)
    finally:
        logger.setLevel(level)


def abort_collectives(code: int, message: str) -> None:
    """Aborts all collectives under way, with an error."""
    runtime().abort_collective_ops(code, message)
