"""Device names, and which devices a strategy gets."""

from __future__ import annotations

import keras
import pytest

import keras_strategies as ks
from keras_strategies.devices import Device, check_devices, parse_device

pytestmark = pytest.mark.one_backend

AVAILABLE = [Device("gpu", 0), Device("gpu", 1), Device("cpu", 0)]


@pytest.mark.parametrize(
    "name, canonical",
    [
        ("gpu:1", "gpu:1"),
        ("GPU:1", "gpu:1"),
        ("/gpu:1", "gpu:1"),
        ("/GPU:1", "gpu:1"),
        ("gpu", "gpu:0"),
        ("cuda:1", "gpu:1"),
        ("cuda", "gpu:0"),
        ("/device:GPU:1", "gpu:1"),
        ("/job:localhost/replica:0/task:0/device:GPU:0", "gpu:0"),
        ("/job:localhost/replica:0/task:0/device:CPU:3", "cpu:3"),
        ("mps", "mps:0"),
        ("tpu:7", "tpu:7"),
        (Device("cpu", 2), "cpu:2"),
    ],
)
def test_names_in_all_spellings(name, canonical) -> None:
    assert str(parse_device(name)) == canonical


@pytest.mark.parametrize("name", ["", "gpu:x", "gpu:-1", "disk:0", "gpu:*", 3, None])
def test_what_is_no_name_is_an_error_that_shows_one(name) -> None:
    with pytest.raises(ValueError, match=r"not a device name.*'gpu:0'"):
        parse_device(name)


@pytest.mark.parametrize(
    "names, error, message",
    [
        (["gpu:0", "gpu:5"], ValueError, r"'gpu:5'.*gpu:0, gpu:1, cpu:0"),
        (["gpu:1", "/GPU:1"], ks.errors.DuplicateDeviceError, "'gpu:1' 2 times"),
        ([], ValueError, "empty"),
    ],
    ids=["unknown", "twice", "none"],
)
def test_devices_that_cannot_be_had(names, error, message) -> None:
    with pytest.raises(error, match=message):
        check_devices(names, AVAILABLE)


def test_devices_are_those_of_the_names_or_all_cpus() -> None:
    strategy = ks.MirroredStrategy(["CPU:0", "/cpu:1"])
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
    assert strategy.num_replicas_in_sync == 2
    every = ks.MirroredStrategy().extended.worker_devices
    assert every == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def test_central_storage_puts_variables_on_the_cpu() -> None:
    strategy = ks.CentralStorageStrategy(["cpu:1", "cpu:2"])
    assert strategy.extended.parameter_devices == ("cpu:0",)
    assert ks.CentralStorageStrategy(["cpu:1"]).extended.parameter_devices == ("cpu:1",)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_virtual_devices_are_counted(count) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        ks.set_virtual_cpu_devices(count)


def test_too_late_for_more_virtual_devices(backend_name) -> None:
    six = [f"cpu:{i}" for i in range(6)]
    if backend_name == "torch":
        # Torch fixes nothing, so more can be had at any time.
        assert ks.MirroredStrategy(six).num_replicas_in_sync == 6
        ks.set_virtual_cpu_devices(4)
        return
    keras.ops.zeros(1)  # The framework's devices are in use from here on.
    with pytest.raises(RuntimeError, match=r"set_virtual_cpu_devices\(6\).* first"):
        ks.MirroredStrategy(six)


def test_an_accelerator_that_is_not_there() -> None:
    with pytest.raises(ks.errors.UnknownDeviceError, match=r"'gpu:7'.*cpu:0"):
        ks.OneDeviceStrategy("gpu:7")


def framework_devices():
    """Two CPU devices as objects of the framework."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.local_devices(backend="cpu")[:2]
    if keras.backend.backend() == "torch":
        import torch

        return [torch.device("cpu:0"), torch.device("cpu", 1)]
    import tensorflow as tf

    return tf.config.list_logical_devices("CPU")[:2]


def test_device_objects_are_accepted_where_names_are() -> None:
    first, second = framework_devices()
    strategy = ks.MirroredStrategy([first, second])
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
    assert ks.OneDeviceStrategy(second).extended.worker_devices == ("cpu:1",)
    assert ks.MirroredStrategy(first).extended.worker_devices == ("cpu:0",)
    central = ks.CentralStorageStrategy([first, second], parameter_device=first)
    assert central.extended.parameter_devices == ("cpu:0",)
    value = ks.PerReplica([1.0, 2.0])
    assert float(ks.ReductionToOneDevice(first).reduce("sum", value, second)) == 3
    assert float(strategy.extended.reduce_to("sum", value, second)) == 3
    assert float(strategy.extended.reduce_to("sum", value, [second])) == 3
    with pytest.raises(ValueError, match="3 is not a device name"):
        ks.MirroredStrategy(3)
