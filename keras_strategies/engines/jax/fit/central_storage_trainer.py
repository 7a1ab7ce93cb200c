"""Central storage: variables and updates on one device, computation on a mesh.

# A step in two programs

A compiled program runs on one set of devices, so a step is two of them. The first
runs on the mesh of the compute devices: it is `model.train_step` up to the place
where that calls `optimizer.stateless_apply`, and returns gradients. The second runs
on the parameter device: it is `optimizer.stateless_apply`, and writes variables and
slots where they lie. A step is thereby cut in the middle of somebody's Python
function; what the first half gets in place of updated variables is an object that
raises when it is used.

What the compute devices produce themselves, metric states and the statistics of
batch normalization, stays with them between the steps of an epoch, and goes to the
parameter device when Keras gives variables their values back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from keras_strategies import keras_compat
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.mesh_programs import MeshCopies, MeshProgram
from keras_strategies.engines.jax.fit.mesh_trainer import DistributionTrainer
from keras_strategies.engines.jax.keras_distribution import StrategyDistribution
from keras_strategies.errors import ContextError

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy

_USE_ANOTHER = (
    "Call `optimizer.stateless_apply` last in the step, once, with the variables as "
    "the step received them, or train this model under ks.MirroredStrategy."
)


class CentralStorageTrainer(DistributionTrainer):
    """One copy of the variables on the parameter device, batches over a mesh."""

    def __init__(self, strategy: Strategy):
        placement = strategy.placement
        super().__init__(
            strategy, StrategyDistribution(placement.replicas, placement.variables)
        )
        self.at_home = jax.sharding.SingleDeviceSharding(self.home)
        self.copies_on_mesh = MeshCopies(self.replicated)

    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        if kind == "train":
            return _TrainStep(self, model)
        return _ReadingStep(self, model, kind)

    def prepared(self, state: Any) -> Any:
        # Bound to the device in the same way as what an update returns.
        return jax.device_put(compiled_steps.unshared(state), self.at_home)


class _ReadingStep:
    """A step of `evaluate` or `predict`, which does not update variables."""

    def __init__(self, trainer: CentralStorageTrainer, model: Any, kind: str):
        self._copies = trainer.copies_on_mesh
        self._step = compiled_steps.keras_step(model, kind)
        self._lengths: list[int] = []
        self._program = (
            MeshProgram(self._flat_step, trainer.replicated)
            if compiled_steps.compiles(model)
            else None
        )

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        self._lengths = [len(group) for group in state]
        flat = _joined(state)
        if self._program is None:
            outputs, _, new = self._flat_step(self._copies.get(flat, keep=True), batch)
        else:
            program = self._program.for_batch(flat, batch)
            read = self._copies.get([flat[i] for i in program.reads], keep=True)
            outputs, _, new = program(flat, read, batch)
        return outputs, _split(new, self._lengths)

    def _flat_step(self, state: list[Any], batch: Any) -> Any:
        outputs, new = self._step(_split(state, self._lengths), batch)
        return outputs, [], _joined(new)


class _TrainStep:
    """Gradients on the mesh, the update on the parameter device."""

    def __init__(self, trainer: CentralStorageTrainer, model: Any):
        self._model = model
        self._step = compiled_steps.keras_step(model, "train")
        self._copies = trainer.copies_on_mesh
        self._home = trainer.at_home
        self._lengths: list[int] = []
        self._program: MeshProgram | None = None
        self._update: Callable[..., Any] = self._apply
        if compiled_steps.compiles(model):
            self._program = MeshProgram(self._flat_step, trainer.replicated)
            self._update = jax.jit(
                self._apply, donate_argnums=(0, 2), out_shardings=self._home
            )

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        trainable, non_trainable, optimizer, metrics = state
        self._lengths = [len(group) for group in state]
        logs, gradients, new = self._compute(_joined(state), batch)
        _, non_trainable, _, metrics = _split(new, self._lengths)
        state = (trainable, non_trainable, optimizer, metrics)
        if gradients:
            gradients = jax.device_put(gradients, self._home)
            state = self._updated(state, gradients)
        return logs, state

    def _compute(self, flat: list[Any], batch: Any) -> tuple[Any, Any, list[Any]]:
        count = self._lengths[0]
        if self._program is None:
            # Step by step nothing shows in advance what is read.
            return self._flat_step(self._copies.get(flat, keep=False), batch)
        program = self._program.for_batch(flat, batch)
        # Weights are new in every step; a copy of them is of use only once.
        weights = [flat[i] for i in program.reads if i < count]
        others = [flat[i] for i in program.reads if i >= count]
        read = self._copies.get(weights, keep=False)
        read += self._copies.get(others, keep=True)
        return program(flat, read, batch)

    def _updated(self, state: Any, gradients: Any) -> Any:
        """The state after the update, noted as soon as it exists."""
        trainable, non_trainable, optimizer, metrics = state
        # As in `compiled_steps.compiled`: no interrupt between the call and the list.
        results: list[Any] = []
        try:
            results.extend(map(self._update, (optimizer,), (gradients,), (trainable,)))
        finally:
            if results:
                trainable, optimizer = results[0]
                state = (trainable, non_trainable, optimizer, metrics)
                keras_compat.record_jax_state(self._model, "train", state)
        return state

    def _apply(self, optimizer: Any, gradients: Any, trainable: Any) -> tuple[Any, Any]:
        return self._model.optimizer.stateless_apply(optimizer, gradients, trainable)

    def _flat_step(self, flat: list[Any], batch: Any) -> tuple[Any, Any, list[Any]]:
        """`train_step` without its update; the gradients come out instead."""
        state = _split(flat, self._lengths)
        record = _UpdateRecord(state)
        with record.in_place_of_update(self._model.optimizer):
            logs, new = self._step(state, batch)
        gradients = record.gradients_of(new)
        return logs, gradients, _joined((state[0], new[1], state[2], new[3]))


class _UpdateRecord:
    """Stands in for `optimizer.stateless_apply` and notes the gradients.

    Args:
        state: the state that the step received, four lists of arrays.
    """

    def __init__(self, state: Sequence[list[Any]]):
        self._trainable, _, self._optimizer, _ = state
        self._gradients: list[Any] | None = None
        self._updated: tuple[list[Any], list[Any]] = ([], [])

    @contextlib.contextmanager
    def in_place_of_update(self, optimizer: Any) -> Iterator[None]:
        # Past Keras's tracking of attributes.
        object.__setattr__(optimizer, "stateless_apply", self)
        try:
            yield
        finally:
            object.__delattr__(optimizer, "stateless_apply")

    def __call__(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        if self._gradients is not None:
            raise ContextError(
                "This train_step calls `optimizer.stateless_apply` twice; under "
                f"ks.CentralStorageStrategy a step has one update. {_USE_ANOTHER}"
            )
        if not _same(trainable_variables, self._trainable) or not _same(
            optimizer_variables, self._optimizer
        ):
            raise ContextError(
                "This train_step changes variables before it calls "
                "`optimizer.stateless_apply`; under ks.CentralStorageStrategy they "
                f"lie on the parameter device. {_USE_ANOTHER}"
            )
        self._gradients = list(grads)
        self._updated = (
            [NotYetUpdated() for _ in self._trainable],
            [NotYetUpdated() for _ in self._optimizer],
        )
        return self._updated

    def gradients_of(self, new: Sequence[Any]) -> list[Any]:
        """The gradients of the update that a step returned; empty without one."""
        trainable, _, optimizer, _ = new
        if _same(trainable, self._trainable) and _same(optimizer, self._optimizer):
            return []
        if self._gradients is not None and (
            _same(trainable, self._updated[0]) and _same(optimizer, self._updated[1])
        ):
            return self._gradients
        raise ContextError(
            "This train_step returns other variables than those that it got from "
            "`optimizer.stateless_apply`; under ks.CentralStorageStrategy the update "
            f"is made on the parameter device. {_USE_ANOTHER}"
        )


class NotYetUpdated:
    """What a step on the compute devices gets for a variable after the update."""

    def __getattr__(self, name: str) -> NoReturn:
        # JAX asks every argument for `__jax_array__`.
        _refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ContextError(
        "This train_step goes on computing with variables that the optimizer has "
        "updated; under ks.CentralStorageStrategy they are updated on the parameter "
        f"device, when the step on the compute devices has ended. {_USE_ANOTHER}"
    )


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "neg", "getitem"):
    setattr(NotYetUpdated, f"__{_name}__", _refuse)
    setattr(NotYetUpdated, f"__r{_name}__", _refuse)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b for a, b in zip(one, other, strict=True)
    )


def _joined(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [array for group in groups for array in group]


def _split(flat: Sequence[Any], lengths: Sequence[int]) -> tuple[list[Any], ...]:
    values = iter(flat)
    return tuple([next(values) for _ in range(length)] for length in lengths)
