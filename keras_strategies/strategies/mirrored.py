"""One replica per local device, with a copy of the variables on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_strategies.collectives.cross_device_ops import check_cross_device_ops
from keras_strategies.engines import get_engine
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import choose_devices, default_devices
from keras_strategies.strategies.mirrored_processes import join_device_processes
from keras_strategies.training.random_sync import sync_random_numbers
from keras_strategies.types import check_random_numbers

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
        cross_device_ops: `CrossDeviceOps` of this package, as in `tf.distribute`, or
            None. The backend's engine reduces values of replicas.
        sync_batch_norm: bool, whether batch normalization uses the statistics of
            the global batch. False uses those of each replica's rows. Torch and
            TensorFlow only; JAX, where all replicas are one program, raises an error.
        random_numbers: `"partitioned"` or `"keras"`, the random numbers of rows on
            Torch, where generators are sequences. `"partitioned"`: drawn in blocks of
            rows with seeds of their own, so that a replica draws for its rows only;
            numbers are those of `OneDeviceStrategy`. `"keras"`: those of Keras without
            a strategy; each replica draws for the rows of all. On JAX and TensorFlow,
            which have generators with counters, both are those of Keras.
        processes: bool, whether each device has a process of its own, on Torch, where
            the replicas of one process wait for its Python interpreter. The script is
            started again for each other device, so it runs up to its end in each of
            them, as under `MultiWorkerMirroredStrategy`: initial weights and random
            numbers are those of the first process, all get the same results, and only
            the first writes models and checkpoints and prints to stdout. None, the
            default, means True for two accelerators or more in a script, and False in
            a notebook, a thread, a command of an installed package (pytest), and a
            process of a cluster. True is an error where no script can be started;
            `ks.launch` calls a function in processes there.

    Raises:
        TypeError: if `cross_device_ops` is something else.
        ValueError: for a device that does not exist or is named twice, for other
            `random_numbers`, and for `processes=True` without a script.
        RuntimeError: if virtual CPU devices are needed and the backend has
            already been used, or if another process of the script ends before it
            makes the strategy.

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
        processes: bool | None = None,
    ):
        engine = get_engine()
        if devices is None:
            replicas = default_devices(engine)
        else:
            replicas = choose_devices(engine, devices)
        check_cross_device_ops(cross_device_ops)  # Before processes are started.
        check_random_numbers(random_numbers)
        worker = join_device_processes(engine, replicas, processes)
        self._cluster_resolver = None if worker is None else worker.resolver
        if worker is None:
            placement = Placement(replicas, replicas[0], mirrored=True)
        else:
            device = worker.device
            placement = Placement(
                (device,), device, mirrored=True, workers=worker.workers
            )
        super().__init__(placement, cross_device_ops, sync_batch_norm, random_numbers)
        if worker is not None:
            sync_random_numbers(engine, worker.workers.group)
