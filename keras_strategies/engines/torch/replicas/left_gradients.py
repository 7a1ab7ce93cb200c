"""Gradients that `backward()` leaves on parameters in `run`.

A replica computes with copies of the variables, and `backward()` adds to the gradients
of these. What code reads as `p.grad`, of a model's parameter or of `variable.value`, is
the sum over all replicas, as on one device. It is computed where it is first needed:
when `.grad` is read, in a step of an optimizer, and at the end of the run. So several
backward passes are summed once.

Each replica sees gradients of its own, equal ones: what it changes in place, such as
`clip_grad_norm_`, it changes once, as a process of its own would. Those of the first
replica count.

Meanwhile the gradients of parameters are set aside, so that what `backward()` adds to a
parameter itself, which a loss may contain (`p.pow(2).sum()`), is known.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.replicas.averaged_losses import warn_of_averaged_loss
from keras_strategies.runtime.state import run_state
from keras_strategies.user_warnings import user_line

#: Sums columns of gradients, each with one of each local replica, over all replicas.
Sums = Callable[[Sequence[Any], Sequence[list[Any]]], list[Any]]

_GRADIENT: Any = torch.Tensor.grad
_GET, _SET, _DELETE = _GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__
#: Functions whose value is the mean of losses, unless they get another `reduction`.
_MEANS = frozenset(
    [
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.cross_entropy,
        functional.huber_loss,
        functional.l1_loss,
        functional.mse_loss,
        functional.nll_loss,
        functional.smooth_l1_loss,
    ]
)


class LeftGradients:
    """The gradients of variables during one run.

    Args:
        variables: the replicas' copies of variables.
        summed: the variables with gradients of earlier runs, by id.
        count: int, local replicas.
    """

    def __init__(
        self,
        variables: ReplicaVariables,
        summed: dict[int, weakref.ref[Any]],
        count: int,
    ):
        self.variables = variables
        self.is_shared = count > 1
        self.replicas = [ReplicaGradients(self) for _ in range(count)]
        self._summed = summed
        #: Whether `.grad` is that of the tensor itself, also on replicas.
        self.is_off = False
        # Variables that may have gradients, by the id of the parameter.
        self._known: dict[int, Any] = {}
        # Parameters without their gradients, and these.
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for reference in list(summed.values()):
            variable = reference()
            if variable is not None:
                self.add(variable, raw_value(variable))

    def add(self, variable: Any, raw: torch.Tensor) -> None:
        """Adds a variable that may have a gradient."""
        if id(raw) not in self._known:
            self._known[id(raw)] = variable
            with self._off():
                self._set_aside(raw)

    @contextlib.contextmanager
    def _off(self) -> Iterator[None]:
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter that may have a gradient."""
        return id(tensor) in self._known

    def _set_aside(self, raw: torch.Tensor) -> None:
        gradient = raw.grad
        self._aside[id(raw)] = (raw, gradient)
        if gradient is not None:
            raw.grad = None

    def set_aside(self) -> None:
        """Sets gradients aside again, after functions outside of replicas."""
        with self._off():
            for variable in self._known.values():
                self._set_aside(raw_value(variable))

    def restore(self) -> None:
        """Gives parameters the gradients that were set aside."""
        for raw, gradient in self._aside.values():
            raw.grad = gradient
        self._aside.clear()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self.restore()

    def of_all(self, raw: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter since the last sum."""
        _, gradient = self._aside.get(id(raw), (raw, raw.grad))
        return None if gradient is None else self.variables.without_shards(gradient)

    def direct(self, raw: torch.Tensor) -> torch.Tensor | None:
        """What `backward()` has added to a parameter itself."""
        found = raw.grad if id(raw) in self._aside else None
        if found is not None and self.variables.without_shards(raw) is not raw:
            raise ContextError(
                "A loss in `run` contains a parameter of which each process has a "
                "shard. Use `variable.value` of `model.trainable_variables`, which is "
                "the full value, in place of `model.parameters()`."
            )
        return found

    def sum(self, sums: Sums) -> None:
        """Adds what the replicas have left to the gradients of the parameters.

        Args:
            sums: the sums over all replicas.
        """
        with self._off():
            self._sum(sums)

    def _sum(self, sums: Sums) -> None:
        columns = {key: self._column(key) for key in self._known}
        found = {
            key: column
            for key, column in columns.items()
            if any(part is not None for part in column)
        }
        variables = [self._known[key] for key in found]
        raws = list(map(raw_value, variables))
        self.restore()
        for raw, gradient in self.replicas[0].views.values():
            raw.grad = None if gradient is None else self._like(raw, gradient)
        for replica in self.replicas:
            replica.clear()
        if raws:
            totals = sums(variables, list(found.values()))
            for variable in variables:
                self._remember(variable)
            # As a backward pass that ends here: with the hooks of parameters.
            torch.autograd.backward(
                raws, [self._like(*pair) for pair in zip(raws, totals, strict=True)]
            )

    def _remember(self, variable: Any) -> None:
        key = id(variable)
        if key not in self._summed:
            gone = functools.partial(self._summed.pop, key, None)
            self._summed[key] = weakref.ref(variable, lambda _: gone())

    def _column(self, key: int) -> list[torch.Tensor | None]:
        """What each local replica has left for one variable."""
        column = [replica.left(key) for replica in self.replicas]
        raw = raw_value(self._known[key])
        direct = self.direct(raw)
        if direct is not None:
            own = column[0]
            column[0] = direct if own is None else direct + own.to(direct.device)
        return column

    def _like(self, raw: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as its parameter has it."""
        return self.variables.with_shards(gradient, raw)


class ReplicaGradients:
    """What `.grad` of variables is on one replica.

    Args:
        run: those of all replicas.
    """

    def __init__(self, run: LeftGradients):
        self._run = run
        # By the id of a copy of a variable: the copy and its parameter.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # By the id of a parameter.
        self._copies_of: dict[int, list[torch.Tensor]] = {}
        #: Parameters whose gradients were read or replaced, with these, also by id.
        self.views: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def copied(self, variable: Any, copy: Any) -> Any:
        """Returns a copy of a variable that the replica will compute with."""
        if copy is not None and copy.requires_grad:
            raw = raw_value(variable)
            self._run.add(variable, raw)
            self._copies[id(copy)] = copy, raw
            self._copies_of.setdefault(id(raw), []).append(copy)
        return copy

    def parameter_of(self, tensor: Any) -> torch.Tensor | None:
        """The parameter of a tensor, or of a copy; None for other tensors."""
        # Functions of `merge_call` see the parameters.
        if self._run.is_off or context.current_replica() is None:
            return None
        if id(tensor) in self._copies:
            return self._copies[id(tensor)][1]
        return tensor if self._run.has(tensor) else None

    def get(self, raw: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter, summed over all replicas."""
        pending = [self.left(id(raw)), self._run.direct(raw)]
        if any(each is not None for each in pending):
            replica = context.current_replica()
            assert replica is not None
            replica.merge_call(lambda strategy: None)
        if id(raw) not in self.views:
            found = self._run.of_all(raw)
            if found is not None and self._run.is_shared:
                found = found.detach().clone()
            self.views[id(raw)] = raw, found
        return self.views[id(raw)][1]

    def set(self, raw: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient of a parameter on this replica."""
        for copy in self._copies_of.get(id(raw), ()):
            copy.grad = None
        if self._run.direct(raw) is not None:
            raw.grad = None
        self.views[id(raw)] = raw, gradient

    def left(self, key: int) -> torch.Tensor | None:
        """What `backward()` has left on the copies of a variable."""
        found = [copy.grad for copy in self._copies_of.get(key, ())]
        parts = [part for part in found if part is not None]
        if any(part.requires_grad for part in parts):
            raise ContextError(
                "`backward(create_graph=True)` in `run` leaves gradients that are "
                "summed over replicas, and cannot be differentiated again. Use "
                "`torch.autograd.grad(loss, values, create_graph=True)` with "
                "`values = [v.value for v in model.trainable_variables]`."
            )
        return sum(parts[1:], start=parts[0]) if parts else None

    def clear(self) -> None:
        """Drops what was left and read, since it has been summed."""
        self.views.clear()
        for copy, _ in self._copies.values():
            copy.grad = None

    def are_sums(self, gradients: Sequence[Any], variables: Any) -> bool:
        """Whether gradients for an optimizer are sums over all replicas.

        Args:
            gradients: those that the optimizer has received.
            variables: their variables; None for those of the optimizer.

        Raises:
            InvalidArgumentError: for some that may be computed from sums.
        """
        read = {key: view for key, (_, view) in self.views.items() if view is not None}
        if variables is not None:
            keys = [id(raw_value(variable)) for variable in variables]
            read = {key: read[key] for key in keys if key in read}
        if not read:
            return False
        sums = set(map(id, read.values()))
        others = [g for g in gradients if g is not None and id(g) not in sums]
        if not others:
            return True
        raise InvalidArgumentError(
            "`optimizer.apply` received gradients that are not those of `p.grad` or "
            "`variable.value.grad`, which this function has read. In `run` these are "
            "sums over all replicas after `backward()`, and `apply` would sum what is "
            "computed from them again. Change them in place (`p.grad.mul_(0.5)`), or "
            "apply in `with ks.gradients_are_aggregated():`. For gradients of one "
            "replica use `ks.value_and_grad` or `torch.autograd.grad`."
        )


def current_gradients() -> ReplicaGradients:
    """Those of the replica whose function this thread runs."""
    state = run_state.enclosing()
    assert state is not None and isinstance(state.record, ReplicaGradients)
    return state.record


class ReplicaFunctions(TorchFunctionMode):
    """Function mode of a replica in `run`, for `.grad`.

    Args:
        gradients: the gradients of the replica.
    """

    def __init__(self, gradients: ReplicaGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in (_GET, _SET, _DELETE):
            if func in _MEANS or func == torch.Tensor.backward:
                return self._of_loss(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        raw = self._gradients.parameter_of(args[0])
        if raw is None:
            return func(*args, **(kwargs or {}))
        if func == _GET:
            return self._gradients.get(raw)
        self._gradients.set(raw, args[1] if func == _SET else None)
        return None

    def _of_loss(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function that averages losses, or that differentiates a loss."""
        state = run_state.enclosing()
        assert state is not None
        if func == torch.Tensor.backward:
            if state.averages.has(args[0]):
                warn_of_averaged_loss(user_line())
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        if kwargs.get("reduction", "mean") == "mean":
            state.averages.note(found)
        return found
