"""`keras-strategies verify`: a script's training compared with one device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.tools.script_names import loaded, named, target

STRATEGIES = ("mirrored", "one_device", "central_storage", "fsdp", "auto")
#: Exit codes.
EQUAL, DIFFERENT = 0, 1


@dataclass(frozen=True)
class TrainingFunction:
    """The training function of a script, for processes that load it themselves.

    Args:
        target: str, `script.py:train`.
    """

    target: str

    @property
    def __name__(self) -> str:
        return self.target

    def load(self) -> Any:
        """Imports the script, and with it its framework."""
        return loaded(self.target)[1]

    def __call__(self) -> None:
        self.load()()


def verify_command(options: argparse.Namespace) -> int:
    """Prints the report of a script.

    Args:
        options: those of the command; `processes` and `workers` are 0 for none,
            `devices` is 0 for two in all, `step` and `save` are empty for none.

    Returns:
        int, 0 if all values are equal, else 1.

    Raises:
        ValueError: if the script or a name in it is missing.
    """
    target(options.target)
    if options.processes:
        report = _of_processes(options)
    elif options.workers:
        from keras_strategies.processes.launch_function import launch

        report, *_ = launch(
            _on_worker,
            options.workers,
            (options,),
            devices_per_worker=_devices_of_process(options),
        )
    else:
        report = _verified(options, _strategy(options))
    print(report)
    if options.save:
        report.save(options.save)
    return EQUAL if report.equal else DIFFERENT


def _of_processes(options: argparse.Namespace) -> Any:
    from keras_strategies.verification.processes.verify_processes import (
        verify_processes,
    )

    if options.workers or options.step:
        raise InvalidArgumentError(
            "`--processes` runs a training function of another framework as it is. "
            "Omit `--workers` and `--step`, which are for functions that make a model."
        )
    return verify_processes(
        TrainingFunction(options.target),
        options.processes,
        _devices_of_process(options),
        options.steps,
        options.tolerance,
    )


def _on_worker(options: argparse.Namespace) -> Any:
    import keras_strategies as ks

    return _verified(options, ks.MultiWorkerMirroredStrategy())


def _verified(options: argparse.Namespace, strategy: Any) -> Any:
    from keras_strategies.verification.verify import verify

    module, build = loaded(options.target)
    data = named(module, options.data)
    step = named(module, options.step) if options.step else None
    return verify(build, data, strategy, options.steps, options.tolerance, step=step)


def _devices_of_process(options: argparse.Namespace) -> int:
    is_split = max(options.processes, options.workers) > 1
    return int(options.devices or (1 if is_split else 2))


def _strategy(options: argparse.Namespace) -> Any:
    import keras_strategies as ks
    from keras_strategies.engines import get_engine

    count = _devices_of_process(options)
    kinds = [each.kind for each in get_engine().local_devices() if each.kind != "cpu"]
    kind = kinds[0] if len(kinds) >= count else "cpu"
    devices = [f"{kind}:{i}" for i in range(count)]
    if options.strategy == "one_device":
        return ks.OneDeviceStrategy(devices[0])
    if options.strategy == "central_storage":
        return ks.CentralStorageStrategy(devices)
    if options.strategy in ("fsdp", "auto"):
        width = 1 if options.strategy == "fsdp" else count
        return ks.ModelParallelStrategy(options.strategy, devices, width)
    return ks.MirroredStrategy(devices, processes=False)
