"""Arguments of a `CrossDeviceOps`: values and destinations."""

from __future__ import annotations

from typing import Any

import keras

from keras_strategies.devices import Device, is_device, parse_device
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.engine import Engine
from keras_strategies.values import DistributedValues, PerReplica


def per_replica(value: Any) -> PerReplica:
    """A value with tensors for components, of one shape."""
    components = list(value.values) if isinstance(value, DistributedValues) else [value]
    # A tensor stays on its device, which Keras's conversion would change on Torch.
    tensors = [
        component
        if keras.ops.is_tensor(component)
        else keras.ops.convert_to_tensor(component)
        for component in components
    ]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise InvalidArgumentError(
            "Replica values are reduced elementwise, so their shapes must be equal. "
            f"Found: {shapes}."
        )
    return PerReplica(tensors)


def device_names(destinations: Any, engine: Engine) -> tuple[str, ...]:
    """The names of the devices that a value is to be put on."""
    return tuple(str(device) for device in _destinations(destinations, engine))


def _destinations(destinations: Any, engine: Engine) -> tuple[Device, ...]:
    if isinstance(destinations, DistributedValues):
        return tuple(engine.device_of(value) for value in destinations.values)
    if isinstance(destinations, keras.Variable):
        return _devices_of_variable(destinations, engine)
    if is_device(destinations):
        return (parse_device(destinations),)
    if isinstance(destinations, (list, tuple)) and destinations:
        return tuple(parse_device(name) for name in destinations)
    if keras.ops.is_tensor(destinations):
        return (engine.device_of(destinations),)
    raise InvalidArgumentError(
        "`destinations` must be a device name or object, a list of them, or a value "
        f"or variable on devices. Received: {destinations!r}"
    )


def _devices_of_variable(variable: Any, engine: Engine) -> tuple[Device, ...]:
    """The devices of a variable and its copies."""
    strategy = strategy_of(variable)
    if strategy is not None and strategy.placement.mirrored:
        found: tuple[Device, ...] = strategy.placement.replicas
        return found
    if strategy is not None:
        return (strategy.placement.variables,)
    return (engine.device_of(raw_value(variable)),)
