"""`ks.verify_processes`: is training on several processes equal to that on one?"""

from __future__ import annotations

import json
import operator
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from keras_strategies.cluster.resolvers.environment import tf_config
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.communication.checksums import checksum
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.processes.launch_function import launch
from keras_strategies.strategies.device_selection import set_virtual_cpu_devices
from keras_strategies.verification.arguments import check_int, check_tolerance
from keras_strategies.verification.processes.causes import ADVICE, Causes
from keras_strategies.verification.processes.comparison import Found, Runs, differences
from keras_strategies.verification.processes.records import (
    ProcessRecord,
    Recorder,
    recorded,
)
from keras_strategies.verification.report import VerificationReport, versions

_TOLERANCE = 2e-5
_DISTURBANCE = 1e-7
#: A larger difference is no noise, in a few steps.
_MOST_NOISE = 1e-2


@dataclass(frozen=True)
class _Options:
    """How a process runs the function.

    Args:
        train: the function.
        steps, seed: as for `verify_processes`.
        devices: int, virtual CPU devices of a process.
        scale: int, by which batches of loaders are multiplied.
        disturbance: float, by which weights are changed.
        address: str, the rendezvous, as `torchrun` sets it.
    """

    train: Callable[[], Any]
    steps: int
    seed: int
    devices: int
    scale: int = 1
    disturbance: float = 0.0
    address: str = ""


def verify_processes(
    train: Callable[[], Any],
    processes: int = 2,
    devices: int = 1,
    steps: int = 4,
    tolerance: float | None = None,
    *,
    seed: int = 0,
    timeout_seconds: float | None = 600.0,
) -> VerificationReport:
    """Compares a training function on several processes or devices with one of each.

    For scripts of other frameworks: it runs as under `torchrun`, with the variables
    `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and so on, and with `TF_CONFIG`. Of Torch, rows,
    outputs of modules, gradients and parameters of each optimizer step are compared
    (DDP, FSDP2, Accelerate, Lightning Fabric); of Keras, logs and variables of each
    batch of `fit` (`keras.distribution`, `tf.distribute`). `ks.observe` adds values.
    A process begins with its rank added to the seed. Dropout is off; masks are
    compared on Torch. A batch size of each process is multiplied for the comparison.

    Args:
        train: callable without arguments that reads its rank from the environment; it
            can be sent by cloudpickle.
        processes: int, processes to compare with one.
        devices: int, GPUs of each process, or virtual CPU devices, to compare with one.
        steps: int, after which the function is ended; 0 to let it return.
        tolerance: float, the difference relative to the largest value of a tensor that
            counts as equal; None for 2e-5.
        seed: int, the seed of the first process.
        timeout_seconds: float, seconds for a training; None for any time.

    Returns:
        A `VerificationReport`, true if all values are equal.

    Raises:
        ValueError: for invalid arguments, or if the function takes no step that can be
            observed.
        RuntimeError: if a process ends or hangs.

    Example:

    >>> def train():
    ...     import my_script  # torch.distributed, DDP
    ...     my_script.main()
    >>> print(ks.verify_processes(train, processes=2))
    """
    _check(train, processes, devices, steps, tolerance)
    options = _Options(train, steps, seed, 1)
    report = _Verification(options, processes, devices, tolerance, timeout_seconds)
    return report.report()


def _check(
    train: Any, processes: Any, devices: Any, steps: Any, tolerance: Any
) -> None:
    if not callable(train):
        raise InvalidArgumentError(
            "`train` of `verify_processes` must be a function without arguments. "
            f"Received: {train!r}"
        )
    check_int("processes", "verify_processes", processes, 1)
    check_int("devices", "verify_processes", devices, 1)
    check_int("steps", "verify_processes", steps, 0)
    if processes * devices < 2:
        raise InvalidArgumentError(
            "`verify_processes` compares several processes or devices with one. Pass "
            "`processes=2`, or `devices=2` for `keras.distribution` and "
            "`tf.distribute`."
        )
    check_tolerance("verify_processes", tolerance)


@dataclass
class _Verification:
    options: _Options
    processes: int
    devices: int
    tolerance: float | None
    timeout: float | None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.taken = 0

    def report(self) -> VerificationReport:
        ranks = self._run(self.processes, replace(self.options, devices=self.devices))
        [alone] = self._run(1, self.options)
        if alone == ProcessRecord(versions=alone.versions):
            raise InvalidArgumentError(
                "The function took no step that can be observed: no `torch.optim` "
                "optimizer was stepped, no Keras model was fitted, and `ks.observe` "
                "was not called. Import the framework at the top of the script, or set "
                "KERAS_BACKEND to the backend that it uses."
            )
        alone, scale = self._with_global_batch(alone, ranks)
        runs = Runs(
            alone,
            ranks,
            self.tolerance or _TOLERANCE,
            replicas=self.processes * self.devices,
        )
        found = [*_of_masks(runs), *differences(runs)]
        if found and found[0].gap < _MOST_NOISE:
            [noisy] = self._run(
                1, replace(self.options, scale=scale, disturbance=_DISTURBANCE)
            )
            if len(noisy.steps) == len(alone.steps):
                found = [*differences(replace(runs, noisy=noisy))]
        return self._of(runs, found)

    def _run(self, processes: int, options: _Options) -> list[ProcessRecord]:
        [address] = free_addresses(1)
        found: list[ProcessRecord] = launch(
            _on_process,
            processes,
            (replace(options, address=address),),
            devices_per_worker=options.devices,
            timeout_seconds=self.timeout,
        )
        if not options.disturbance:
            self.taken += len(found[0].steps)
        return found

    def _with_global_batch(
        self, alone: ProcessRecord, ranks: list[ProcessRecord]
    ) -> tuple[ProcessRecord, int]:
        """One process with as many rows as all; the batch size may be a process's."""
        if not alone.steps or not all(rank.steps for rank in ranks):
            return alone, 1
        rows = len(alone.steps[0].rows)
        own = [rank.steps[0].rows for rank in ranks]
        count = len(ranks)
        if count == 1 or not rows or any(len(each) != rows for each in own):
            return alone, 1
        if all(sorted(each) == sorted(own[0]) for each in own):
            return alone, 1
        [scaled] = self._run(1, replace(self.options, scale=count))
        if not scaled.steps or len(scaled.steps[0].rows) != count * rows:
            return alone, 1
        self.notes.append(
            f"The script's batch size is that of a process: compared with one process "
            f"and loaders with {count} times as many rows."
        )
        return scaled, count

    def _of(self, runs: Runs, found: list[Found]) -> VerificationReport:
        cause, evidence = "", ""
        if found and found[0].kind == "mask":
            cause, evidence = "same_random_numbers", found[0].text
        elif found:
            cause, evidence = Causes(runs, found).cause()
        alone, rank = runs.alone, runs.ranks[0]
        for name in alone.notes | rank.notes:
            self.notes.append(name)
        if rank.masks and cause != "same_random_numbers":
            self.notes.append(
                "Dropout passed its inputs unchanged; the ranks' masks differ."
            )
        sums = {}
        for name, record in (("one device", alone), ("strategy", rank)):
            last = record.steps[-1].variables if record.steps else {}
            own = np.array([checksum(each) for each in last.values()])
            sums[f"variables, {name}"] = f"{checksum(own):08x}" if own.size else ""
        return VerificationReport(
            f"{_name(self.options.train)} on {self.processes} processes of "
            f"{self.devices} devices",
            "one process with one device",
            len(alone.steps),
            runs.tolerance,
            tuple(each.difference() for each in found),
            cause,
            evidence,
            tuple(self.notes),
            {"on one device": len(alone.steps), "in all runs": self.taken},
            self.options.seed,
            sums,
            versions(rank.versions),
            ADVICE.get(cause, ""),
        )


def _of_masks(runs: Runs) -> list[Found]:
    """Whether ranks draw the same masks for different rows."""
    ranks = runs.ranks
    rows = [sorted(step.rows) for rank in ranks for step in rank.steps[:1]]
    if len(ranks) < 2 or (rows and all(each == rows[0] for each in rows)):
        return []
    one, other = ranks[0].masks, ranks[1].masks
    equal = sum(a == b and a != 0 for a, b in zip(one, other, strict=False))
    text = f"{equal} of {len(one)} masks are the same on ranks 0 and 1"
    return [Found("mask", "dropout", 1, text=text)] if equal else []


def _name(train: Any) -> str:
    return getattr(train, "__name__", type(train).__name__)


def _on_process(options: _Options) -> ProcessRecord:
    """Runs the function in this process, as `torchrun` does."""
    task = json.loads(os.environ[tf_config.VARIABLE])
    rank, count = task["task"]["index"], len(task["cluster"]["worker"])
    host, _, port = options.address.rpartition(":")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    if count == 1:
        # A cluster of one is none: `tf.distribute` would start a server for it.
        del os.environ[tf_config.VARIABLE]
    if keras.backend.backend() != "torch":
        set_virtual_cpu_devices(options.devices)
    _seed(options.seed + rank)
    loaded = getattr(options.train, "load", None)
    if loaded is not None:
        loaded()
    try:
        return recorded(lambda: _recorder(options), options.train)
    finally:
        _leave_group()


def _seed(seed: int) -> None:
    """Seeds all generators; `keras.utils.set_random_seed` would import TensorFlow."""
    random.seed(seed)
    np.random.seed(seed)
    for name, function in (("torch", "manual_seed"), ("tensorflow", "random.set_seed")):
        if name in sys.modules:
            operator.attrgetter(function)(sys.modules[name])(seed)


def _recorder(options: _Options) -> Recorder:
    if "torch" in sys.modules:
        from keras_strategies.verification.processes.torch_recorder import TorchRecorder

        return TorchRecorder(options.steps, options.scale, options.disturbance)
    from keras_strategies.verification.processes.keras_recorder import KerasRecorder

    return KerasRecorder(options.steps, options.disturbance)


def _leave_group() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
