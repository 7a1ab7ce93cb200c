"""`keras-strategies choose`: strategy, launcher and numbers for a script's model."""

from __future__ import annotations

import argparse
import functools
import math
from dataclasses import dataclass
from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.text_tables import Table, readable_bytes
from keras_strategies.tools.script_names import loaded, named

#: Of all weights, the share of tables above which only their rows should travel.
_MOSTLY_TABLES = 0.5


@dataclass(frozen=True)
class Needs:
    """What a step needs, by plans.

    Args:
        single: int, bytes on one device for the whole batch.
        each: int, bytes on each device, with copies of the variables.
        slots: int, bytes of the optimizer's slots.
        sharded: int, bytes on each device, with weights, gradients and slots in shards.
        sent: int, bytes that a device sends in a step, with copies.
        tables: float, the share of embeddings in the bytes of the weights.
        is_peak: bool, whether the peak of a step is known; otherwise these are
            variables, gradients and the largest activation, and a step needs more.
    """

    single: int
    each: int
    slots: int
    sharded: int
    sent: int
    tables: float
    is_peak: bool


@dataclass(frozen=True)
class Choice:
    """A strategy, the command that starts the script, and why.

    Args:
        strategy: str, the line of the script.
        launcher: str, the command.
        reason: str, a sentence.
    """

    strategy: str
    launcher: str
    reason: str


def choose_command(options: argparse.Namespace) -> int:
    """Prints needs and a choice.

    Args:
        options: those of the command.

    Returns:
        int, 0.

    Raises:
        ValueError: if the script, a name in it or an argument is not valid.
    """
    for name in ("batch", "machines"):
        if getattr(options, name) < 1:
            raise InvalidArgumentError(
                f"`--{name}` must be 1 or more. Received: {getattr(options, name)}"
            )
    devices = options.devices or _local_accelerators()
    memory = _bytes_of(options.memory)
    needs = _needs(options, devices)
    found = choose(needs, devices, options.machines, memory)
    each = options.batch / (devices * options.machines)
    rows = (
        ("one device, all rows", readable_bytes(needs.single)),
        ("each device, copies of the variables", readable_bytes(needs.each)),
        ("each device, variables in shards", readable_bytes(needs.sharded)),
        ("sent by a device, copies", readable_bytes(needs.sent)),
    )
    facts = (
        ("devices", f"{devices} on each of {options.machines} machine(s)"),
        ("rows of a device", f"{math.floor(each)} to {math.ceil(each)}"),
        ("memory of a device", readable_bytes(memory) if memory else "not given"),
        ("strategy", found.strategy),
        ("start", found.launcher),
        ("because", found.reason),
    )
    note = "" if needs.is_peak else _NO_PEAK
    what = "peak of a step" if needs.is_peak else "at least"
    title = f"{options.target}, global batch of {options.batch:,} rows"
    print(Table(title, ("needs", what), rows, frozenset((what,)), (), facts, note))
    return 0


_NO_PEAK = (
    "On this backend plans have no peak: these are variables, gradients and the "
    "largest activation. KERAS_BACKEND=jax or torch says more."
)


def choose(needs: Needs, devices: int, machines: int, memory: int) -> Choice:
    """The strategy for a model.

    Args:
        needs: of the model.
        devices: int, accelerators of each machine.
        machines: int.
        memory: int, bytes of a device; 0 for any.
    """
    script = "train.py"
    launcher = f"python {script}"
    if machines > 1:
        launcher = (
            f"torchrun --nnodes={machines} --nproc-per-node=1 --rdzv-backend=c10d "
            f"--rdzv-endpoint=HOST:29400 {script}"
        )
    if not memory or needs.each <= memory:
        reason = "variables and a share of the batch fit on each device"
        if not memory:
            reason = "memory was not given: compare the needs above with your devices"
        name = "MultiWorkerMirroredStrategy" if machines > 1 else "MirroredStrategy"
        if machines == devices == 1:
            name, reason = "OneDeviceStrategy", "there is one device"
        return Choice(f"ks.{name}()", launcher, reason)
    if needs.tables > _MOSTLY_TABLES:
        reason = (
            f"{needs.tables:.0%} of the weights are tables, of which a batch needs few "
            "rows"
        )
        return Choice("ks.ParameterServerStrategy()", launcher, reason)
    if machines == 1 and devices > 1 and needs.each - needs.slots <= memory:
        reason = "only the optimizer's slots do not fit on each device"
        return Choice("ks.CentralStorageStrategy()", launcher, reason)
    if devices * machines > 1 and needs.sharded <= memory:
        reason = "variables fit in shards, and not as copies"
        return Choice('ks.ModelParallelStrategy("fsdp")', launcher, reason)
    reason = (
        "nothing fits as it is: `ks.fit_into` also accumulates gradients and computes "
        "activations again; otherwise use more devices or a smaller batch"
    )
    fit = f'ks.fit_into("{readable_bytes(memory)}", build, shapes).strategy'
    return Choice(fit, launcher, reason)


def _local_accelerators() -> int:
    from keras_strategies.engines import get_engine

    kinds = [device.kind for device in get_engine().local_devices()]
    # Without any, two virtual devices stand for those that the plan is for.
    return sum(kind != "cpu" for kind in kinds) or 2


def _bytes_of(memory: str) -> int:
    from keras_strategies.strategies.fit_into import parsed_bytes

    return parsed_bytes(memory) if memory else 0


def _needs(options: argparse.Namespace, devices: int) -> Needs:
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(devices)
    module, build = loaded(options.target)
    shapes = functools.partial(_shapes, named(module, options.data))
    cpus = [f"cpu:{i}" for i in range(devices)]
    # Workers have their share of the batch, and the same variables.
    own = max(devices, math.ceil(options.batch / options.machines))
    single = ks.OneDeviceStrategy("cpu:0").plan(build, shapes(options.batch))
    if devices == 1:
        many = ks.OneDeviceStrategy("cpu:0").plan(build, shapes(own))
    else:
        copies = ks.MirroredStrategy(cpus, processes=False)
        many = copies.plan(build, shapes(own))
    weights = [v for v in single.variables if v.kind == "weight"]
    slots = sum(v.nbytes for v in single.variables if v.kind == "slot")
    state = 2 * sum(v.nbytes for v in weights) + slots
    total = sum(v.nbytes for v in weights) or 1
    tables = sum(v.nbytes for v in weights if "embeddings" in v.path) / total
    each = _bytes_needed(many)
    count = devices * options.machines
    return Needs(
        _bytes_needed(single),
        each,
        slots,
        each - state + math.ceil(state / count),
        many.sent,
        tables,
        many.peak is not None,
    )


def _shapes(data: Any, rows: int) -> Any:
    """A batch of shapes with a number of rows, as `plan` takes it."""
    import keras

    from keras_strategies.verification.batches import fit_arguments, read_batches

    (batch,) = read_batches(fit_arguments(data), 1)
    return keras.tree.map_structure(
        lambda leaf: keras.KerasTensor((rows, *leaf.shape[1:]), leaf.dtype.name),
        batch.parts,
    )


def _bytes_needed(plan: Any) -> int:
    if plan.peak is not None:
        return int(plan.peak)
    kinds = ("weight", "gradient", "slot")
    state = sum(max(plan.bytes_per_device(k).values(), default=0) for k in kinds)
    return int(state + (plan.cost.activation or 0))
