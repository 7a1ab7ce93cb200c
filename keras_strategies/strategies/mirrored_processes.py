"""One process for each device of a strategy, on Torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_strategies.cluster import SimpleClusterResolver
from keras_strategies.cluster.environment import find_cluster, find_local_number
from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.errors import BackendError, ClusterError, InvalidArgumentError
from keras_strategies.processes import device_processes
from keras_strategies.processes.device_processes import DeviceProcess, Program
from keras_strategies.runtime.engine import Engine
from keras_strategies.strategies.multi_worker import join_workers
from keras_strategies.types import CommunicationOptions


@dataclass(frozen=True)
class DeviceWorker:
    """This process, for one of the strategy's devices.

    Args:
        device: the device of this process.
        workers: the connected processes.
        resolver: their addresses, and the number of this one.
    """

    device: Device
    workers: Communicator
    resolver: SimpleClusterResolver


# The devices for which the program has processes.
_devices: list[tuple[Device, ...]] = []
# The devices of strategies that each process of the program has for itself, because
# they were made before the processes were started.
_alone: list[tuple[Device, ...]] = []


def join_device_processes(
    engine: Engine,
    devices: Sequence[Device],
    wanted: bool | None,
    *,
    also_cpus: bool = False,
    options: CommunicationOptions | None = None,
) -> DeviceWorker | None:
    """Connects the processes of the devices, and starts them in the first of them.

    Args:
        engine: the engine.
        devices: the devices of the strategy.
        wanted: bool, whether each device has a process; None to decide.
        also_cpus: bool, whether None means processes for virtual CPU devices, too.
        options: those of the processes' collectives.

    Returns:
        A `DeviceWorker`; None if this process has all devices.

    Raises:
        TypeError, ValueError: if `wanted` is something else, or cannot be done here.
        RuntimeError: if a process ends before it connects.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidArgumentError(
            "`processes` must be True, for a process for each device, False, for all "
            f"devices in this one, or None to decide. Received: {wanted!r}"
        )
    devices = tuple(devices)
    own = device_processes.own_process()
    if own is None:
        program = _program(engine, devices, wanted, also_cpus)
        if program is None:
            _alone.append(devices)
            return None
        own = device_processes.start_others(program, len(devices), len(_alone))
    elif len(_alone) < own.made_before:
        _alone.append(devices)
        return None
    _check_same(devices, own, wanted)
    device = engine.keep_accelerator(lambda found: devices[own.index])
    assert device is not None
    resolver = SimpleClusterResolver(
        {"worker": list(own.addresses)}, task_type="worker", task_id=own.index
    )
    absence = device_processes.missing_process
    workers = join_workers(
        resolver, engine, options or CommunicationOptions(), absence=absence
    )
    assert workers is not None
    workers = workers.with_replicas(lambda: 1)
    workers.are_device_processes = True
    return DeviceWorker(device, workers, resolver)


def _program(
    engine: Engine, devices: tuple[Device, ...], wanted: bool | None, also_cpus: bool
) -> Program | None:
    """The script to start for the other devices; None to keep them in this process."""
    if wanted is False or (wanted is None and not engine.has_python_per_device):
        return None
    is_shared = devices[0].kind == "cpu" and not also_cpus
    if not wanted and (len(devices) == 1 or is_shared):
        return None
    is_launched = find_cluster() is not None or find_local_number() is not None
    program = Program.find()
    if not wanted:
        is_script = program is not None and not program.is_installed
        return program if is_script and not is_launched else None
    if not engine.has_python_per_device:
        raise BackendError(
            f"`processes=True` with KERAS_BACKEND={engine.name!r}: there, one program "
            "computes the steps of all devices, and processes would not be faster. "
            "Omit it."
        )
    if is_launched:
        raise ClusterError(
            "`processes=True` was given, but a launcher has started this process as "
            "one of a cluster. Use ks.MultiWorkerMirroredStrategy(), and start a "
            "process for each device with the launcher."
        )
    if len(devices) == 1:
        raise InvalidArgumentError(
            f"`processes=True` needs two devices or more. Found: {devices[0]}. For "
            'virtual CPU devices, pass `devices=["cpu:0", "cpu:1"]`.'
        )
    if program is None:
        raise InvalidArgumentError(
            "`processes=True` starts the script of this program again for the other "
            "devices, but this code is in a notebook, at a prompt, in a thread or in a "
            "process of `multiprocessing`. Make a function `train` with "
            "ks.MultiWorkerMirroredStrategy(), and call "
            f"`ks.launch(train, workers={len(devices)})`."
        )
    return program


def _check_same(
    devices: tuple[Device, ...], own: DeviceProcess, wanted: bool | None
) -> None:
    if not _devices and len(devices) == len(own.addresses):
        _devices.append(devices)
    if _devices != [devices] or wanted is False:
        found = f"`processes=False` and {', '.join(map(str, devices))}"
        if wanted is not False:
            found = ", ".join(map(str, devices))
        first = _devices[0] if _devices else ()
        raise ClusterError(
            f"This script runs in {len(own.addresses)} processes, one for each device "
            f"of its first strategy ({', '.join(map(str, first))}), and "
            f"another strategy was made for {found}. Use the same devices for all "
            "strategies of a script, or pass `processes=False` to the first one."
        )
