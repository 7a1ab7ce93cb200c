"""Steps of optimizers and schedules of Torch, which replicas of a process share.

Each replica of `run` calls `optimizer.step()`. It is taken once, when all replicas have
called it, with the gradients that they have left (`left_gradients.py`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keras_strategies.engines.torch.replicas.left_gradients import current_gradients
from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.runtime import context
from keras_strategies.values import DistributedValues, flatten, select_replica

_lock = threading.Lock()
# Runs that use the hooks, and callables that remove them.
_users: list[object] = []
_removals: list[Callable[[], None]] = []


@contextlib.contextmanager
def steps_taken_once() -> Iterator[None]:
    """Context of a run, in which replicas take steps together."""
    user = object()
    with _lock:
        if not _users:
            _removals.append(register_optimizer_step_pre_hook(_before_step).remove)
            _removals.extend(map(_replaced_step, _schedulers(LRScheduler)))
        _users.append(user)
    try:
        yield
    finally:
        with _lock:
            _users.remove(user)
            while not _users and _removals:
                _removals.pop()()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Takes the step for all replicas; what the replica calls then has no parameters.

    The arguments of a step begin with the optimizer.
    """
    replica = context.current_replica()
    if replica is None:
        return None
    closures = [each for each in (*args[1:], *kwargs.values()) if callable(each)]
    if closures and replica.num_replicas_in_sync == 1:
        return None  # It computes the gradients itself.
    if closures:
        raise ContextError(
            f"`{type(optimizer).__name__}.step` received a closure in `run`, which "
            "each replica would call for itself. Call `backward()` and then `step()` "
            "without arguments; LBFGS needs `ks.OneDeviceStrategy`."
        )
    workers = replica.strategy.workers
    if workers is not None and not workers.actions.is_fixed:
        raise ContextError(
            f"A step of `torch.optim.{type(optimizer).__name__}` was taken in `run`, "
            "and the strategy's workers may change (`elastic=`). The state of an "
            "optimizer of Torch is not sent to a worker that joins. Use an optimizer "
            "of Keras: `optimizer.apply(gradients, model.trainable_variables)`."
        )
    if replica.num_replicas_in_sync > 1:
        _check_parameters(optimizer)
    replica.merge_call(_step, (optimizer, *args[1:]), kwargs)
    without = object.__new__(type(optimizer))
    vars(without).update(vars(optimizer))
    without.param_groups = [{**group, "params": []} for group in without.param_groups]
    return (without, *args[1:]), kwargs


def _check_parameters(optimizer: Any) -> None:
    """Raises for parameters whose gradients are not summed over replicas."""
    gradients = current_gradients()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_summed = gradients.parameter_of(parameter) is not None
            if not is_summed and parameter.grad is not None:
                raise ContextError(
                    f"`{type(optimizer).__name__}.step` was called in `run` with a "
                    f"parameter of shape {tuple(parameter.shape)} that has a gradient "
                    "and that the replicas have not read as the value of a "
                    "`keras.Variable`, so its gradient is that of some rows. Compute "
                    "gradients in `run` with a Keras model that is made in `with "
                    "strategy.scope():`. Parameters of a `TorchModuleWrapper` are "
                    "trained by `fit`, or with `ks.OneDeviceStrategy`."
                )


def _step(strategy: Any, stepped: Any, *args: Any, **kwargs: Any) -> None:
    """Calls `step` of an optimizer or a schedule that replicas share.

    If each replica has made one, the first replica's counts.
    """
    if any(map(_differ, flatten([args, kwargs]))):
        kind = type(select_replica(0, stepped)).__name__
        raise InvalidArgumentError(
            f"`{kind}.step` received values in `run` that differ between replicas: "
            f"{[*args, *kwargs.values()]}. It is called once for all of them. Call it "
            "after `run`, or sum them before: "
            '`ks.get_replica_context().all_reduce("SUM", value)`.'
        )
    args, kwargs = select_replica(0, (args, kwargs))
    select_replica(0, stepped).step(*args, **kwargs)


def _differ(value: Any) -> bool:
    """Whether an argument differs between replicas."""
    if not isinstance(value, DistributedValues):
        return False
    first, *others = value.values
    is_number = isinstance(first, (int, float))
    return not is_number or any(other != first for other in others)


def _schedulers(kind: Any) -> list[Any]:
    """The classes of schedules that have a `step` of their own."""
    found = [kind] if "step" in vars(kind) else []
    return found + [each for sub in kind.__subclasses__() for each in _schedulers(sub)]


def _replaced_step(kind: Any) -> Callable[[], None]:
    """Replaces `step` of a class of schedules; returns what restores it."""
    original = vars(kind)["step"]

    @functools.wraps(original)
    def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        replica = context.current_replica()
        if replica is None:
            return original(scheduler, *args, **kwargs)
        return replica.merge_call(_step, (scheduler, *args), kwargs)

    kind.step = step
    return functools.partial(setattr, kind, "step", original)
