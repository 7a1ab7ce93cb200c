"""One replica per local device, with a copy of the variables on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_strategies.engines import get_engine
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import choose_devices, default_devices

if TYPE_CHECKING:
    from keras_strategies.collectives import CrossDeviceOps


class MirroredStrategy(Strategy):
    """Synchronous training on the devices of one machine.

    Every batch is split over the devices, each of which has a copy of the variables.
    Weights, losses and metrics equal those of one device on the full batch.

    Args:
        devices: sequence of device names or objects; None for all local accelerators,
            or all CPU devices where there are none. `["cpu:0", "cpu:1"]` makes
            virtual CPU devices.
        cross_device_ops: `CrossDeviceOps`, reductions between replicas: gradients in
            `fit` and in `run`, `ReplicaContext.all_reduce`, `reduce` and
            `extended.reduce_to`. None for the backend's own. On JAX, XLA inserts the
            all-reduces of steps whichever class is given, and only the classes of
            this package are accepted.
        sync_batch_norm: bool, whether batch normalization uses the statistics of
            the global batch. False uses those of each replica's rows. Torch and
            TensorFlow only; JAX, where all replicas are one program, raises an error.
        random_numbers: `"partitioned"` or `"keras"`, the random numbers of rows on
            Torch, where generators are sequences. `"partitioned"`: drawn in blocks of
            rows with seeds of their own, so that a replica draws for its rows only;
            numbers are those of `OneDeviceStrategy`. `"keras"`: those of Keras without
            a strategy; each replica draws for the rows of all. On JAX and TensorFlow,
            which have generators with counters, both are those of Keras.

    Raises:
        TypeError: if `cross_device_ops` is something else.
        ValueError: for a device that does not exist or is named twice, and for other
            `random_numbers`.
        RuntimeError: if virtual CPU devices are needed and the backend has
            already been used.

    Example:

    >>> strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> model.fit(x, y, batch_size=32)
    """

    def __init__(
        self,
        devices: Sequence[object] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        sync_batch_norm: bool = True,
        random_numbers: str = "partitioned",
    ):
        engine = get_engine()
        if devices is None:
            replicas = default_devices(engine)
        else:
            replicas = choose_devices(engine, devices)
        placement = Placement(replicas, replicas[0], mirrored=True)
        super().__init__(placement, cross_device_ops, sync_batch_norm, random_numbers)
