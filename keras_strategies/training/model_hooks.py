"""Hooks of strategies into Keras models, layers and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import keras

from keras_strategies.communication.communicator import loop_of
from keras_strategies.engines import get_engine
from keras_strategies.errors import (
    InvalidArgumentError,
    ModelScopeError,
)
from keras_strategies.keras_compat import hooks
from keras_strategies.keras_compat.models.building import check_not_empty, element_spec
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    overwritten_by_apply,
    step_variable,
)
from keras_strategies.keras_compat.state_scope import current_policy
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.strategy_variables import (
    set_variable_strategy,
)
from keras_strategies.keras_compat.variables.values import (
    declared_shape,
    guard_value,
    raw_value,
)
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.added_sums import sent_together
from keras_strategies.runtime.data_parallel.row_functions import (
    loss_of_rows,
    mask_weights,
    reduced_values,
    update_of_rows,
)
from keras_strategies.runtime.random_numbers.row_draws import drawing
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.averaged_losses import check_gradients, note_loss
from keras_strategies.runtime.row_splits import check_batch
from keras_strategies.runtime.state import run_state
from keras_strategies.runtime.state.replica_state import AddedState
from keras_strategies.runtime.state.run_state import RunState
from keras_strategies.training.batch_norm import replica_moments
from keras_strategies.training.model_input import model_arguments
from keras_strategies.training.model_methods import drivers_of
from keras_strategies.training.strategy_model import set_model_strategy


def install_hooks() -> None:
    """Hooks Keras's models, layers and optimizers, once for the process.

    Called where a strategy first acts: in its scope, in `run`, and where it distributes
    a dataset, which models outside of the scope take as well.
    """
    hooks.install(StrategyHooks())


class StrategyHooks:
    """Implementation of `ModelHooks` for strategies."""

    def after_init(self, made: Any) -> None:
        strategy = context.current_strategy()
        if strategy is None:
            return
        if not isinstance(made, keras.Variable):
            set_model_strategy(made, strategy)
            return
        set_variable_strategy(made, strategy)
        _made_in_run(made)
        loop_of(strategy.workers).created(made)
        if (
            run_state.is_local(made)
            and made.aggregation in (None, "none")
            and strategy.num_replicas_in_sync > 1
        ):
            guard_value(made, _check_read_on_replica)

    def before_init(self, variable: Any) -> None:
        strategy = context.current_strategy()
        if strategy is not None:
            set_variable_strategy(variable, strategy)
            if strategy.drivers.servers is not None:
                strategy.drivers.servers.before_init(variable)

    @contextlib.contextmanager
    def init_context(self) -> Iterator[None]:
        replica = context.current_replica()
        if replica is None or run_state.enclosing() is None:
            yield
            return
        # The numbers of an initial value have no rows.
        with drawing(None), replica.strategy.drivers.run.creating_variable():
            yield

    def check_strategy(self, model: Any, name: str) -> None:
        current = context.current_strategy()
        if (
            current is None
            or context.current_replica()
            or strategy_of(model) is not None
        ):
            return
        raise ModelScopeError(
            f"`{name}` was called inside the scope of {current!r} on model "
            f"{model.name!r}, which was created outside of it, so the strategy has "
            "not placed its variables. Create and compile the model in `with "
            "strategy.scope():`; `fit` may be called anywhere."
        )

    def input(self, arguments: dict[str, Any]) -> dict[str, Any]:
        strategy = context.current_strategy()
        return {} if strategy is not None else model_arguments(None, "fit", arguments)

    def input_made(self, epochs: Any) -> None:
        strategy = context.current_strategy()
        if strategy is None:
            return
        check_not_empty(epochs)
        if strategy.drivers.servers is not None:
            strategy.drivers.servers.input_made(epochs)
        if strategy.num_replicas_in_sync > 1:
            spec = element_spec(epochs.data_adapter)
            if spec is not None:
                check_batch(spec)

    def building(self, model: Any, batch: Any) -> None:
        if strategy_of(model).num_replicas_in_sync > 1:
            check_batch(batch)

    def has_state(self, model: Any) -> bool:
        return drivers_of(model).servers is None

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        policy = current_policy()
        if policy is not None:
            return policy.initial_value(value, shape, dtype)
        if isinstance(value, (int, float)) and get_engine().in_program():
            # TensorFlow creates the variable outside of the program, and could not lift
            # a number that has become a tensor in it.
            return _constant(value), (), dtype or _dtype_of(value)
        return value, shape, dtype

    def optimizer_apply(
        self, optimizer: Any, original: Callable[..., Any], grads: Any, variables: Any
    ) -> Any:
        strategy = context.current_strategy()
        if strategy is not None:
            loop_of(strategy.workers).training()
        replica = context.current_replica()
        if replica is None or not isinstance(current_policy(), RunState):
            return get_engine().optimizer_apply(optimizer, original)(grads, variables)
        if strategy_of(step_variable(optimizer)) is None:
            replica.strategy.drivers.fit.adopt(optimizer.variables)
        if variables is not None and not optimizer.built:
            replica.merge_call(
                lambda strategy, variables: optimizer.build(list(variables)),
                args=(tuple(variables),),
            )
        run = replica.strategy.drivers.run
        grads = list(grads)
        aggregate = not (_are_aggregated.get() or run.are_sums(grads, variables))
        if aggregate:
            check_gradients(grads)
            grads = _largest_once(
                replica, grads, overwritten_by_apply(optimizer, variables)
            )
        original = get_engine().optimizer_apply(optimizer, original)
        run.apply_gradients(original, grads, variables, aggregate)
        # As Keras; `optimizer.iterations` may compute with it, after the update.
        return step_variable(optimizer)

    def initialized(self, variable: Any) -> None:
        sharding = strategy_of(variable).drivers.sharding
        if sharding is not None:
            sharding.initialized(variable)

    def array_to_assign(self, variable: Any, value: Any) -> Any:
        if declared_shape(variable) != value.shape:
            return value
        return strategy_of(variable).drivers.fit.from_host(variable, value)

    def variable_assigned(self, variable: Any) -> None:
        strategy = strategy_of(variable)
        if (
            strategy is not None
            and run_state.is_local(variable)
            and strategy.drivers.servers is None
        ):
            strategy.drivers.run.variable_assigned(variable)

    def variable_added(
        self, variable: Any, original: Callable[..., Any], delta: Any
    ) -> Any:
        state = current_policy()
        if isinstance(state, (RunState, AddedState)):
            return state.add(variable, delta)
        return original(delta)

    def representation(self, variable: Any, text: str) -> str:
        strategy = strategy_of(variable)
        if strategy is None or raw_value(variable) is None:
            return text
        copies = strategy.drivers.fit.copies(variable)
        places = ", ".join(dict.fromkeys(copy.device for copy in copies))
        if run_state.is_local(variable) and strategy.num_replicas_in_sync > 1:
            kind = f"per-replica, aggregation={variable.aggregation!r}, on"
        else:
            kind = "mirrored on" if len(copies) > 1 else "on"
            if any(copy.role == "shard" for copy in copies):
                kind = "in parts on"
        return f"{text.removesuffix('>')}, {kind} {places}>"

    def shows_warnings(self) -> bool:
        replica = context.current_replica()
        return replica is None or replica.shows_warnings

    def moments(
        self, layer: Any, original: Callable[..., Any], inputs: Any, mask: Any
    ) -> Any:
        replica = context.current_replica()
        if (
            replica is None
            or not replica.synchronizes_batch_norm
            or replica.num_replicas_in_sync == 1
        ):
            return original(inputs, mask)
        return replica_moments(replica, layer, inputs, mask)

    def loss(
        self,
        loss: Any,
        original: Callable[..., Any],
        y_true: Any,
        y_pred: Any,
        weights: Any,
    ) -> Any:
        found = loss_of_rows(original, loss, y_true, y_pred, weights)
        return note_loss(loss, weights, found)

    metric_update = staticmethod(update_of_rows)
    metrics_updated = staticmethod(sent_together)
    mask_weights = staticmethod(mask_weights)
    reduced_values = staticmethod(reduced_values)


def _constant(value: float) -> Callable[..., Any]:
    """An initializer of scalars."""
    return lambda shape, dtype=None: keras.ops.convert_to_tensor(value, dtype)


def _dtype_of(value: float) -> str:
    """The dtype that Keras gives a variable of a Python number."""
    if isinstance(value, float):
        return keras.config.floatx()  # type: ignore[no-any-return]
    return "bool" if isinstance(value, bool) else "int32"


def _made_in_run(variable: Any) -> None:
    replica = context.current_replica()
    state = None if replica is None else run_state.enclosing()
    if replica is not None and state is not None and state.made is not None:
        state.made.add(variable, replica.replica_id_in_sync_group)


def _largest_once(
    replica: ReplicaContext, grads: Any, overwritten: Sequence[int]
) -> Any:
    """Gradients whose sum is the largest one, for overwritten variables.

    One replica has the largest new value, and the others zeros.
    """
    if not overwritten:
        return grads
    found = list(grads)
    given = {i: found[i] for i in overwritten if found[i] is not None}
    is_first = keras.ops.equal(replica.replica_id_in_sync_group, 0)
    for i, value in replica.all_reduce("max", given).items():
        found[i] = keras.ops.where(is_first, value, keras.ops.zeros_like(value))
    return found


def _check_read_on_replica(variable: Any) -> None:
    if context.current_replica() is None:
        raise InvalidArgumentError(
            f"Variable {variable.path!r} has a separate value on each replica and "
            "the aggregation 'none', so it has no single value outside of `run`. "
            "Read it in the function that you pass to `run`, or create it with "
            "aggregation='sum', 'mean' or 'only_first_replica'."
        )


_are_aggregated = ContextVar("gradients are aggregated", default=False)


@contextlib.contextmanager
def gradients_are_aggregated() -> Iterator[None]:
    """Context in a replica function: gradients are equal on all replicas already.

    Inside, `optimizer.apply` and `apply_gradients` do not sum them over replicas.

    Example:

    >>> gradients = ks.get_replica_context().all_reduce("sum", gradients)
    >>> with ks.gradients_are_aggregated():
    ...     optimizer.apply(gradients, model.trainable_variables)
    """
    token = _are_aggregated.set(True)
    try:
        yield
    finally:
        _are_aggregated.reset(token)
