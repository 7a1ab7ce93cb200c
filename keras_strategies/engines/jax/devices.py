"""Names of JAX devices."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Sequence

import jax

from keras_strategies.devices import Device
from keras_strategies.engines.jax.compat import devices_are_fixed
from keras_strategies.errors import BackendInUseError
from keras_strategies.processes.local_cluster import visible_gpus

# XLA_FLAGS="--xla_force_host_platform_device_count=4", older than jax_num_cpu_devices.
_XLA_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def local_devices() -> tuple[Device, ...]:
    """The devices of this process: those of the default platform, then CPUs."""
    found = list(jax.local_devices())
    if found[0].platform != "cpu":
        found += _cpu_devices()
    return tuple(device_of(device) for device in found)


def _cpu_devices() -> list[jax.Device]:
    try:
        return list(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out.
        return []


def jax_device(device: Device, process: int | None = None) -> jax.Device:
    """The JAX device with a name. Indices count the devices of one process.

    Args:
        device: the name.
        process: int, the number of the process; None for this one.
    """
    return jax.local_devices(process, backend=device.kind)[device.index]


def device_of(device: jax.Device) -> Device:
    """The name of a JAX device."""
    siblings = jax.local_devices(backend=device.platform)
    if device in siblings:
        return Device(device.platform, siblings.index(device))
    return Device(device.platform, device.id)  # A device of another process.


def default_device() -> jax.Device:
    """The device of arrays without a placement."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def keep_gpu(choose: Callable[[Sequence[Device]], Device | None]) -> None:
    """Configures JAX to use the chosen GPU only.

    JAX allocates 75 % of the memory of each GPU when it lists them, so they are counted
    without it.
    """
    if not _may_use_cuda():
        return
    gpus = visible_gpus(os.environ)
    chosen = choose([Device("gpu", i) for i in range(len(gpus))])
    if chosen is not None:
        # Counted among those of CUDA_VISIBLE_DEVICES.
        jax.config.update("jax_cuda_visible_devices", str(chosen.index))


def _may_use_cuda() -> bool:
    given = str(jax.config.jax_platforms or "")  # type: ignore[attr-defined]
    is_named = not given or "cuda" in given or "gpu" in given
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return is_named and any("cuda" in plugin.name for plugin in plugins)


def cpu_device_count() -> int:
    """The number of CPU devices that JAX has, or will have when first used."""
    if devices_are_fixed():
        return len(_cpu_devices())
    configured = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
    if configured > 0:
        return configured
    flag = _XLA_CPU_DEVICES.search(os.environ.get("XLA_FLAGS", ""))
    return int(flag.group(1)) if flag else 1


def set_virtual_cpu_devices(count: int) -> None:
    """Creates `count` CPU devices, if fewer exist."""
    if not devices_are_fixed():
        jax.config.update("jax_num_cpu_devices", count)
        _raise_thread_count(count)
        return
    existing = cpu_device_count()
    if existing < count:
        raise BackendInUseError(
            f"Cannot create {count} CPU devices: JAX is already in use with "
            f"{existing}. Call "
            f"`keras_strategies.set_virtual_cpu_devices({count})` first in the "
            "program, before any array or model is made, or set the environment "
            f"variable JAX_NUM_CPU_DEVICES={count}. In a notebook, restart the kernel."
        )


def _raise_thread_count(count: int) -> None:
    """Enlarges XLA's thread pool, so that all-reduces do not deadlock.

    XLA 0.10 runs the programs of all CPU devices on one pool, by default with one
    thread per core. A program in an all-reduce blocks its thread; when programs of the
    next step take the other threads, a device of this step may get none, and XLA ends
    the process after 40 seconds. XLA reads the size of the pool from NPROC.
    """
    os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 2 * count))
