"""One replica per local device, with one copy of the variables for all."""

from __future__ import annotations

from collections.abc import Sequence

from keras_strategies.engines import get_engine
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import choose_devices, default_devices


class CentralStorageStrategy(Strategy):
    """Synchronous training with variables and updates on one device.

    The parameter device has the only copy of each variable and each optimizer slot and
    applies the updates; compute devices get the values that a step reads and return
    gradients. For models with an optimizer state too large for the accelerators.

    Args:
        compute_devices: sequence of device names or objects; None for all local
            accelerators, or all CPU devices where there are none.
        parameter_device: a device name or object; None for the compute device if there
            is one, else for `"cpu:0"`.
        sync_batch_norm: bool, as for `MirroredStrategy`.
        random_numbers: `"partitioned"` or `"keras"`, as for `MirroredStrategy`.

    Raises:
        ValueError: for a device that does not exist or is named twice.

    Example:

    >>> strategy = ks.CentralStorageStrategy(["gpu:0", "gpu:1"], "cpu:0")
    """

    def __init__(
        self,
        compute_devices: Sequence[object] | None = None,
        parameter_device: object | None = None,
        *,
        sync_batch_norm: bool = True,
        random_numbers: str = "partitioned",
    ):
        engine = get_engine()
        if compute_devices is None:
            replicas = default_devices(engine)
        else:
            replicas = choose_devices(engine, compute_devices, "compute_devices")
        if parameter_device is not None:
            (home,) = choose_devices(engine, [parameter_device], "parameter_device")
        elif len(replicas) == 1:
            (home,) = replicas
        else:
            (home,) = choose_devices(engine, ["cpu:0"], "parameter_device")
        placement = Placement(replicas, home, mirrored=False)
        super().__init__(
            placement, sync_batch_norm=sync_batch_norm, random_numbers=random_numbers
        )
