"""Training that fits into the memory of the devices, chosen by plans."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.cluster import ClusterResolver
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.reports.plan import Plan, abstract_batch
from keras_strategies.strategies.model_parallel import ModelParallelStrategy
from keras_strategies.text_tables import ShownAsTable, Table, readable_bytes
from keras_strategies.types import CommunicationOptions
from keras_strategies.values import flatten, map_structure

_UNITS = {
    "": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", 1)},
}
#: Accumulation of more steps than this is tried after rematerialization.
_FEW_STEPS = 4


@dataclass(frozen=True)
class TrainingChoice:
    """How a model is trained: what `fit_into` has tried.

    Args:
        layout: str, `"replicated"`, `"fsdp"` or `"auto"`.
        model_parallel: int, devices along the model axis.
        rematerializes: bool, whether layers compute their activations again in the
            backward pass (`keras.RematScope("full")`).
        accumulation_steps: int, batches of which the gradients are accumulated.
        peak: int, bytes that a device needs while a step runs; None if not known.
        sent: int, bytes that a device sends for one update.
    """

    layout: str
    model_parallel: int
    rematerializes: bool
    accumulation_steps: int
    peak: int | None
    sent: int


@dataclass(frozen=True, repr=False)
class MemoryFit(ShownAsTable):
    """A strategy, and how to make the model; prints as a table of what was tried.

    Args:
        strategy: the `ModelParallelStrategy`.
        plan: its `Plan`, of one step.
        choice: what was chosen.
        tried: tuple of all `TrainingChoice` that were planned.
        batch_size: int, rows of a step, for `fit`: those of the batch that was given,
            divided by the steps that are accumulated.
        memory: int, bytes of a device.
    """

    strategy: ModelParallelStrategy
    plan: Plan
    choice: TrainingChoice
    tried: tuple[TrainingChoice, ...]
    batch_size: int
    memory: int

    def make_model(self, build_fn: Callable[[], Any]) -> Any:
        """Makes the model in the scope of the strategy, as it was planned.

        Args:
            build_fn: the callable that `fit_into` was given.

        Returns:
            The compiled model.
        """
        choice = self.choice
        with self.strategy.scope():
            return _made(build_fn, choice.rematerializes, choice.accumulation_steps)

    def _table(self) -> Table:
        header = ("layout", "model axis", "remat", "accumulation", "peak", "sent", "")
        rows = tuple(
            (
                each.layout,
                str(each.model_parallel),
                "full" if each.rematerializes else "no",
                str(each.accumulation_steps),
                "unknown" if each.peak is None else readable_bytes(each.peak),
                readable_bytes(each.sent),
                "chosen" if each is self.choice else "",
            )
            for each in self.tried
        )
        numbers = frozenset(("model axis", "accumulation", "peak", "sent"))
        facts = (("batch size of a step", str(self.batch_size)),)
        title = f"Training in {readable_bytes(self.memory)} per device"
        return Table(title, header, rows, numbers, facts=facts)


def fit_into(
    memory: str | int,
    build_fn: Callable[[], Any],
    batch_shapes: Any,
    devices: Sequence[object] | None = None,
    *,
    min_shard_bytes: int | None = None,
    cluster_resolver: ClusterResolver | None = None,
    communication_options: CommunicationOptions | None = None,
) -> MemoryFit:
    """Chooses a mesh, layouts, rematerialization and accumulation by plans.

    Replicated variables, `"fsdp"` and `"auto"` are planned for each shape of the mesh,
    and of those that fit the one that sends the fewest bytes is taken. Where none fits,
    gradients are accumulated over 2 and 4 steps; then activations are computed again in
    the backward pass; then both, down to one row of each batch shard.

    Args:
        memory: bytes of a device, as int or as text such as `"16 GiB"`. The peak of a
            step is at most this; leave some for the framework itself.
        build_fn: callable without arguments that makes and compiles the model; called
            once for each plan.
        batch_shapes: the global batch of an update, as for `Strategy.plan`.
        devices: as for `ModelParallelStrategy`.
        min_shard_bytes: as for `ModelParallelStrategy`.
        cluster_resolver: as for `ModelParallelStrategy`.
        communication_options: as for `ModelParallelStrategy`.

    Returns:
        A `MemoryFit`.

    Raises:
        ValueError: if nothing fits, with the least memory that would do, if plans have
            no peak, or if the optimizer accumulates gradients already.

    Example:

    >>> fit = ks.fit_into("16 GiB", make_model, ((256, 512), (256, 512)))
    >>> print(fit)
    >>> model = fit.make_model(make_model)
    >>> model.fit(x, y, batch_size=fit.batch_size)

    Accumulated gradients are the mean of those of the steps, as Keras accumulates them:
    equal to those of the whole batch, but for layers that compute a row from others too
    (batch normalization).
    """
    limit = parsed_bytes(memory)
    batch = abstract_batch(batch_shapes)
    rows = next((x.shape[0] for x in flatten(batch) if x is not None and x.shape), 0)
    if not rows:
        raise InvalidArgumentError(
            "`batch_shapes` must be a structure of shapes or arrays as `fit` gets it: "
            f"(x, y) or (x, y, sample_weight). Received: {batch_shapes!r}"
        )
    options: dict[str, Any] = {
        "cluster_resolver": cluster_resolver,
        "communication_options": communication_options,
    }
    replicated = ModelParallelStrategy({}, devices, 1, **options)
    strategies = {("replicated", 1): replicated}
    count = len(replicated.mesh.devices)
    for layout, width in _sharded_layouts(count):
        strategies[layout, width] = ModelParallelStrategy(
            layout, devices, width, min_shard_bytes=min_shard_bytes, **options
        )
    tried: list[TrainingChoice] = []
    for rematerializes, steps in _levels(rows):
        fitting: list[tuple[TrainingChoice, Plan]] = []
        for (layout, width), strategy in list(strategies.items()):
            if rows // steps < strategy.num_replicas_in_sync:
                continue
            make = functools.partial(_made, build_fn, rematerializes, steps)
            plan = strategy.plan(make, _part(batch, steps))
            choice = TrainingChoice(
                layout, width, rematerializes, steps, plan.peak, plan.sent * steps
            )
            tried.append(choice)
            if choice.peak is not None and choice.peak <= limit:
                fitting.append((choice, plan))
            elif _variables_of(plan) > limit:
                # Whatever is saved of activations.
                del strategies[layout, width]
        if fitting:
            choice, plan = min(fitting, key=lambda each: each[0].sent)
            strategy = strategies[choice.layout, choice.model_parallel]
            _check_on_workers(strategy, choice)
            return MemoryFit(strategy, plan, choice, tuple(tried), rows // steps, limit)
        if all(each.peak is None for each in tried):
            break
    if not tried:
        raise InvalidArgumentError(
            f"`batch_shapes` has {rows} rows, and every layout splits them over more "
            f"replicas, since {count} devices compute. Use at least {count} rows, or "
            "fewer `devices`."
        )
    raise _too_little(limit, tried, count)


def _variables_of(plan: Plan) -> int:
    """Bytes of weights and slots on the device that has the most."""
    kinds = [plan.bytes_per_device(kind) for kind in ("weight", "slot")]
    devices = {device for kind in kinds for device in kind}
    totals = (sum(kind.get(device, 0) for kind in kinds) for device in devices)
    return max(totals, default=0)


def _sharded_layouts(count: int) -> Iterator[tuple[str, int]]:
    """Layouts, and the devices along the model axis."""
    if count > 1:
        yield "fsdp", 1
    for width in range(2, count + 1):
        if count % width == 0:
            yield "auto", width
            if width < count:
                yield "fsdp", width


def _levels(rows: int) -> Iterator[tuple[bool, int]]:
    """Whether activations are computed again, and steps that are accumulated."""
    steps = [n for n in (2**i for i in range(rows.bit_length())) if rows % n == 0]
    few = [n for n in steps if n <= _FEW_STEPS]
    yield from ((False, n) for n in few)
    yield from ((True, n) for n in steps)


def _made(build_fn: Callable[[], Any], rematerializes: bool, steps: int) -> Any:
    scope = keras.RematScope("full") if rematerializes else contextlib.nullcontext()
    with scope:
        model = build_fn()
    if steps == 1 or not getattr(model, "compiled", False):
        return model
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer.gradient_accumulation_steps is not None or optimizer.built:
        raise InvalidArgumentError(
            f"`fit_into` found that {type(optimizer).__name__} of the model "
            + (
                "is built"
                if optimizer.built
                else "has gradient_accumulation_steps="
                f"{optimizer.gradient_accumulation_steps}"
            )
            + ", and chooses the steps of accumulation itself. Make and compile the "
            "model in `build_fn`, with an optimizer that does not accumulate."
        )
    optimizer.gradient_accumulation_steps = steps
    return model


def _part(batch: Any, steps: int) -> Any:
    """The batch of one of several steps."""

    def leaf(given: Any) -> Any:
        if given is None:
            return None
        return keras.KerasTensor(
            (given.shape[0] // steps, *given.shape[1:]), given.dtype
        )

    return map_structure(leaf, batch)


def parsed_bytes(memory: str | int) -> int:
    """Bytes of a device, given as int or as text such as `"16 GiB"`.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    found = None
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory)
    unit = "" if found is None else found[2].upper().removesuffix("YTES")
    unit = "" if unit == "B" else unit
    if found is None or unit not in _UNITS or not float(found[1]):
        raise InvalidArgumentError(
            "`memory` must be the bytes of a device, as a positive int or as text such "
            f'as "16 GiB" or "800 MB". Received: {memory!r}'
        )
    return int(float(found[1]) * _UNITS[unit])


def _check_on_workers(strategy: ModelParallelStrategy, choice: TrainingChoice) -> None:
    workers = strategy.workers
    if workers is None:
        return
    chosen = [
        choice.layout,
        choice.model_parallel,
        choice.rematerializes,
        choice.accumulation_steps,
    ]
    workers.group.agree("the choice of fit_into", chosen)


def _too_little(
    limit: int, tried: Sequence[TrainingChoice], count: int
) -> InvalidArgumentError:
    known = [each for each in tried if each.peak is not None]
    if not known:
        return InvalidArgumentError(
            "`fit_into` needs the peak memory of a step, which no plan of this model "
            "has. `print(strategy.plan(...))` says why. On TensorFlow none has one: "
            "use KERAS_BACKEND=jax or torch, or train one step with "
            "`ks.ModelParallelStrategy` and read "
            "`tf.config.experimental.get_memory_info(device)`."
        )
    best = min(known, key=lambda each: each.peak or 0)
    assert best.peak is not None
    again = ", with keras.RematScope" if best.rematerializes else ""
    more = f"about {math.ceil(count * best.peak / limit)} devices, "
    if best.layout == "replicated":
        more = ""  # Each has all weights.
    return InvalidArgumentError(
        f"No training of the model fits into {readable_bytes(limit)} per device on "
        f"{count} devices. The least is {readable_bytes(best.peak)}: layout "
        f"{best.layout!r}, model_parallel={best.model_parallel}, "
        f"{best.accumulation_steps} accumulated steps{again}. Use {more}fewer bytes "
        "per weight (a dtype policy), an optimizer with fewer slots, or smaller "
        "batches."
    )
