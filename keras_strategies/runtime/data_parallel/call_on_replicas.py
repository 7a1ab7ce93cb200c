"""One layer call on replicas: slices of arguments, outputs, losses and state."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_strategies.errors import BatchError
from keras_strategies.keras_compat.models.layer_calls import (
    layer_calls_through,
)
from keras_strategies.keras_compat.models.layers import (
    clear_losses,
    get_logits,
    get_mask,
    set_logits,
    set_mask,
)
from keras_strategies.keras_compat.optimizers.optimizer_parts import is_overwritten
from keras_strategies.keras_compat.recorded_calls import recorded_calls
from keras_strategies.keras_compat.structures import with_leaves
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.rows.code_names import noted_lines
from keras_strategies.rows.layer_calls import LayerCall
from keras_strategies.rows.row_placements import SAME, RowKind
from keras_strategies.runtime.data_parallel.added_sums import AddedSums
from keras_strategies.runtime.data_parallel.exchanged_sums import ExchangedSums
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    GradientBoundary,
    GradientTarget,
    combined,
    sum_on_worker,
)
from keras_strategies.runtime.data_parallel.replica_executor import (
    CallOnReplica,
    LayerCallDriver,
    ReplicaExecutor,
    UnmatchedSumsError,
    UnprovedCallError,
)
from keras_strategies.runtime.data_parallel.row_parts import parts_of
from keras_strategies.runtime.data_parallel.split_plan import (
    Channel,
    SplitOutput,
    SplitPlan,
    channel_of,
    losses_of,
    outputs_of,
)
from keras_strategies.runtime.random_numbers.row_draws import OwnRows, drawing
from keras_strategies.runtime.replicas.tensor_primitives import is_float
from keras_strategies.runtime.state.replica_state import (
    CallState,
    ReplicaResult,
    ReplicaState,
    has_rows,
    merged_value,
)
from keras_strategies.user_warnings import warn_user

# Layers for which second-order gradients have been warned about.
_twice_differentiated: weakref.WeakSet[Any] = weakref.WeakSet()
#: The variables of Keras's batch normalization, by their names.
_BATCH_STATISTICS = ("moving_mean", "moving_variance")
#: A tensor of the global batch, and its slices on the replicas.
_SplitTensor = tuple[Any, list[Any]]
#: Sets the mask or the logits of a tensor.
_Setter = Callable[[Any, Any], None]


def call_on_replicas(plan: SplitPlan, driver: LayerCallDriver) -> Any:
    """Calls a layer on all replicas, each on its rows.

    Args:
        plan: the plan of the call.
        driver: the replicas of the engine.

    Returns:
        The outputs for the global batch.

    Raises:
        NotOnReplicasError: if the layer does not work on replicas.
        UnprovedCallError: if replicas computed something else than what is proved. Then
            nothing is assigned.
        UnmatchedSumsError: if they have not called the sums of the proof.
    """
    layer = plan.layer_call.layer
    places = list(_places(plan.layer_call))
    executor = driver.executor(plan)
    is_noted = executor.is_eager and not plan.proof.is_by_type
    numbers = [(i, setter) for i, setter, _ in places]
    call = _call_on_replica(plan, numbers, is_noted)
    tensors = [tensor for _, _, tensor in places]
    try:
        forward = executor.forward(tensors, call)
        results = forward.results
        if any(result.has_diverged is not None for result in results):
            _compare_sums(plan, results, executor.is_eager)
        if is_noted:
            _compare_calls(plan, results)
    except UnmatchedSumsError:
        executor.undo_draws()
        raise
    except (UnprovedCallError, BatchError) as error:
        is_first = not plan.proof.calls and isinstance(error, BatchError)
        if not is_noted or is_first:
            raise  # It is a fault of the first call after the proof.
        executor.undo_draws()
        raise UnprovedCallError from error
    inputs = [
        (tensor, own)
        for (_, setter, tensor), own, needs_gradient in zip(
            places, forward.slices, forward.needs_gradient, strict=True
        )
        if needs_gradient and setter is not set_mask
    ]
    outputs = outputs_of(plan, results, forward.activations)
    losses = losses_of(plan, results)
    channels = [channel for each in outputs for channel in each.channels] + losses
    targets = _targets(plan, inputs, forward.reads)
    connected = _connected(executor, targets, channels, results)
    found = _global_outputs(plan, results, outputs, connected)
    if plan.layer_call.adds:
        _add_updates(plan, results)
    else:
        _merge_updates(plan, results)
    if losses:
        clear_losses(layer)
        # Functional models refuse `add_loss` on themselves; their base does not.
        keras.layers.Layer.add_loss(layer, connected[-len(losses) :])
    return found


def _places(call: LayerCall) -> Iterator[tuple[int, _Setter | None, Any]]:
    """The tensors of a call that are split.

    Yields:
        The number of a leaf; None for the leaf itself, or the function that sets its
        mask or logits; and the tensor.
    """
    for i, leaf in enumerate(call.leaves):
        if has_rows(leaf, call.rows):
            yield i, None, leaf
            mask, logits = get_mask(leaf), get_logits(leaf)
            if mask is not None:
                yield i, set_mask, mask
            if logits is not None:
                yield i, set_logits, logits


def _call_on_replica(
    plan: SplitPlan,
    places: Sequence[tuple[int, _Setter | None]],
    is_noted: bool,
) -> CallOnReplica:
    """The call of a layer on one replica, with slices of the tensors at `places`."""
    noting = recorded_calls if is_noted else contextlib.nullcontext
    is_first = is_noted and not plan.proof.calls and bool(plan.proof.lines)
    noting_lines = noted_lines if is_first else contextlib.nullcontext
    call = plan.layer_call

    def run(
        slices: Sequence[Any], state: CallState, rows: OwnRows | None
    ) -> ReplicaResult:
        leaves = list(call.leaves)
        for (i, setter), own in zip(places, slices, strict=True):
            if setter is None:
                leaves[i] = own
            else:
                setter(leaves[i], own)
        args, kwargs = call.arguments(leaves)
        draws = plan.draws(OwnRows(0, 0, 0) if rows is None else rows)
        with (
            state.scope() as scope,
            drawing(draws),
            noting() as calls,
            noting_lines() as lines,
        ):
            has_diverged = None
            if not plan.proof.events:
                outputs = call.call(*args, **kwargs)
            else:
                own = keras.ops.shape(slices[0])[0]
                sums = ExchangedSums(
                    call.layer,
                    plan.proof.events,
                    own,
                    lambda: plan.fractions([own])[0],
                    plan.row_split.all_have_rows,
                )
                outputs = sums.during(lambda: call.call(*args, **kwargs))
                has_diverged = sums.has_diverged
        return ReplicaResult(outputs, state, scope.losses, calls, lines, has_diverged)

    return run


def _compare_sums(
    plan: SplitPlan, results: Sequence[ReplicaResult], is_eager: bool
) -> None:
    """Raises on all workers if a replica has called other sums than those proved."""
    diverged = any(result.has_diverged for result in results)
    if is_eager and plan.row_split.workers is not None:
        with plan.on_lead():
            flag = keras.ops.convert_to_tensor(float(diverged))
            [total] = plan.row_split.summed([flag])
        diverged = float(total) > 0
    if diverged:
        raise UnprovedCallError if plan.proof.calls else UnmatchedSumsError


def _compare_calls(plan: SplitPlan, results: Sequence[ReplicaResult]) -> None:
    """Compares what replicas called with the first call after the proof.

    The lines of the user's that this one ran are compared with those of the proof.

    So a flag may be anywhere: in a module, in a configuration, in a file.
    """
    proved = plan.proof.calls
    for result, rows in zip(results, plan.row_split.sizes, strict=True):
        assert result.calls is not None
        if result.lines is not None and not result.lines <= plan.proof.lines:
            raise UnprovedCallError
        if proved.setdefault(rows, result.calls) != result.calls:
            raise UnprovedCallError


# Outputs.


def _connected(
    executor: ReplicaExecutor,
    targets: list[GradientTarget],
    channels: Sequence[Channel],
    results: Sequence[ReplicaResult],
) -> list[Any]:
    """Global tensors for the channels, with gradients through the replicas."""
    plan = executor.plan
    floats = [is_float(channel.parts[0]) for channel in channels]
    if not targets or not any(floats):
        return [combined(plan, channel) for channel in channels]
    own = list(itertools.compress(channels, floats))
    boundary = GradientBoundary(plan, own, targets, _before(plan, results[0]))
    found = iter(executor.connect(boundary))
    return [
        next(found) if is_float else combined(plan, channel)
        for channel, is_float in zip(channels, floats, strict=True)
    ]


def _targets(
    plan: SplitPlan,
    inputs: Sequence[_SplitTensor],
    reads: Sequence[dict[Any, tuple[Any, Any]]],
) -> list[GradientTarget]:
    """The variables and inputs of a call that receive gradients.

    Args:
        plan: the plan of the call.
        inputs: the tensors that were split and have a gradient.
        reads: see `ForwardPass`.
    """
    found: dict[Any, GradientTarget] = {}
    ops = plan.ops
    with plan.on_lead():
        for i, of_replica in enumerate(reads):
            for key, (variable, local) in of_replica.items():
                target = found.get(key)
                if target is None:
                    target = found[key] = GradientTarget(
                        ops.read_with_gradient(variable, local),
                        [None] * len(reads),
                        False,
                        variable,
                        is_overwritten=is_overwritten(variable),
                    )
                target.locals[i] = local
    of_inputs = [
        GradientTarget(
            tensor,
            slices,
            True,
            as_row_parts=plan.as_row_parts
            if parts_of(tensor, plan.row_split) is not None
            else None,
        )
        for tensor, slices in inputs
    ]
    return [*found.values(), *of_inputs]


def _global_outputs(
    plan: SplitPlan,
    results: Sequence[ReplicaResult],
    outputs: Sequence[SplitOutput],
    connected: Sequence[Any],
) -> Any:
    values = iter(connected)
    leaves = []
    for i, output in enumerate(outputs):
        if not output.channels:
            leaves.append(results[0].leaves[i])
            continue
        value = next(values)
        if output.activation is not None:
            logits, apply = value, output.activation.apply
            if apply is None:
                value = next(values)
            else:
                with plan.on_lead():
                    value = apply(logits)
            set_logits(value, logits)
        masks = [result.masks[i] for result in results]
        if masks[0] is not None:
            of_mask = replace(output.channels[-1], parts=masks)
            set_mask(value, combined(plan, of_mask))
        leaves.append(value)
    return with_leaves(results[0].outputs, leaves)


# State that layers update.


def _merge_updates(plan: SplitPlan, results: Sequence[ReplicaResult]) -> None:
    """Assigns updated variables; replicas exchange those that differ."""
    states = [result.state.updates for result in results]
    differing = []
    for key, (variable, value) in states[0].items():
        is_seed = is_seed_state(variable)
        placement = SAME if is_seed else plan.proof.of_update(variable)
        if placement is None:
            raise BatchError(
                f"Layer {plan.layer_call.layer.name!r} assigned {variable.path!r} "
                "in one call and not in another with arguments of the same kinds. "
                "Assign the same variables in every call."
            )
        if placement.kind is RowKind.SAME or "float" not in variable.dtype:
            with plan.on_lead():
                variable.assign(plan.to_lead(value))
        else:
            differing.append(key)
    if not differing:
        return
    with plan.on_lead():
        columns = [
            [plan.to_lead(state[key][1]) for state in states] for key in differing
        ]
        everywhere = plan.row_split.replica_set.all_values(columns)
    weights = plan.fractions(plan.row_split.every)
    for key, values in zip(differing, everywhere, strict=True):
        variable, _ = states[0][key]
        variable.assign(merged_value(variable, values, weights))


def _add_updates(plan: SplitPlan, results: Sequence[ReplicaResult]) -> None:
    """Adds to variables what replicas, whose variables were zero, have in them."""
    sums = []
    for key, (variable, value) in results[0].state.updates.items():
        values = [result.state.updates[key][1] for result in results]
        with plan.on_lead():
            channel = channel_of(plan, values, plan.proof.of_update(variable) or SAME)
            if channel.are_equal:
                own = keras.ops.cast(plan.to_lead(value), variable.dtype)
                variable.assign(variable + own)
            else:
                sums.append((variable, sum_on_worker(plan, channel)))
    AddedSums(plan.row_split, sums, plan.on_lead).add()


# Gradients of gradients.


def _before(plan: SplitPlan, result: ReplicaResult) -> list[tuple[Any, Any]]:
    """The variables that a call assigns, with copies of their values before it."""
    if plan.layer_call.adds:
        return []
    with plan.on_lead():
        return [
            (variable, keras.ops.copy(keras.ops.stop_gradient(raw_value(variable))))
            for variable, _ in result.state.updates.values()
            # A call of Keras's own batch normalization assigns or reads them, not both.
            if not (plan.proof.is_by_type and variable.name in _BATCH_STATISTICS)
        ]


def recomputed(
    boundary: GradientBoundary,
    value_of: Callable[[Any], Any],
    assigned: Callable[[Any, Callable[[], Any], Any], Any],
) -> list[Any]:
    """The output tensors and added losses of the unsplit call.

    Second-order gradients are computed by this call, with operations that the
    framework can differentiate twice. It reads the state before the call on the
    replicas, so that it draws the same random numbers, and its assignments are dropped:
    that call has made them already.

    Args:
        boundary: the boundary of the call.
        value_of: returns the tensor to use as a variable's value.
        assigned: see `ReplicaState`.
    """
    call, layer = boundary.plan.layer_call, boundary.plan.layer_call.layer

    # Here, and not in a branch of the layer's code that reads them first.
    state = {
        id(variable): assigned(variable, functools.partial(value_of, variable), before)
        for variable, before in boundary.before
    }

    def value(variable: Any) -> Any:
        found = state.get(id(variable))
        return value_of(variable) if found is None else found

    if layer not in _twice_differentiated:
        _twice_differentiated.add(layer)
        warn_user(
            f"A gradient through layer {layer.name!r} ({type(layer).__name__}) is "
            "differentiated itself. Second-order gradients across replicas are "
            "not supported, so for these the layer is called once more, on one "
            "device with the unsplit batch, which is exact but not parallel. Draws "
            "without a `keras.random.SeedGenerator` can give other numbers there. "
            "Compute the penalty inside a layer's `call` to compute it on all replicas."
        )
    args, kwargs = call.arguments(call.leaves)
    scope = ReplicaState(value, assigned=assigned).scope()
    with layer_calls_through(None), scope:
        outputs = call.call(*args, **kwargs)
    found = keras.tree.flatten(outputs)
    return [leaf for leaf in found if keras.ops.is_tensor(leaf)] + scope.losses
