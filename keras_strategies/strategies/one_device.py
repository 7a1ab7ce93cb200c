"""One replica on one device."""

from __future__ import annotations

from keras_strategies.engines import get_engine
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import choose_devices


class OneDeviceStrategy(Strategy):
    """Puts variables, input and computation on one device.

    Args:
        device: a device name such as `"gpu:0"`, or a device object of the framework
            (`torch.device`, `jax.Device`, `tf.config.LogicalDevice`).
        random_numbers: `"partitioned"` or `"keras"`, as for `MirroredStrategy`.

    Raises:
        ValueError: if there is no such device; the message lists what exists.

    Example:

    >>> strategy = ks.OneDeviceStrategy("cpu:0")
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    """

    def __init__(self, device: object, *, random_numbers: str = "partitioned"):
        (chosen,) = choose_devices(get_engine(), [device], what="device")
        super().__init__(
            Placement((chosen,), chosen, mirrored=False), random_numbers=random_numbers
        )
