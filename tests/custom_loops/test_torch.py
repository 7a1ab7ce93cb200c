"""Loops in Torch's own words: optimizers, clipping, schedules, as scripts for DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("Torch only", allow_module_level=True)

from custom_loops.helpers import assert_alike
from harness.torch_loops import batches, distributed, gradients, loss_of, make_model

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adamw_each": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.fixture(params=[1, 3])
def strategy(request: Any) -> Any:
    if request.param == 1:
        return ks.OneDeviceStrategy("cpu:0")
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(3)])


Step = Callable[[Any, Any, int], Any]


MakeStep = Callable[[Any], tuple[Step, Callable[[], Any]]]


def train(strategy: Any, make_step: MakeStep, make: Any) -> dict[str, Any]:
    """Trains with a step of rows, labels and the number of all rows."""
    model = make(strategy)
    step, after = make_step(model)
    seen = []
    for x, y in batches():
        if strategy is None:
            step(torch.from_numpy(x), torch.from_numpy(y), len(x))
        else:
            own = [distributed(strategy, each) for each in (x, y)]
            strategy.run(step, args=(*own, len(x)))
        seen.append(after())
    return {"weights": model.get_weights(), "seen": seen}


def assert_trains_as_one_device(
    strategy: Any, make_step: MakeStep, make: Any = make_model
) -> None:
    found, expected = (train(each, make_step, make) for each in (strategy, None))
    pairs = zip(expected["weights"], make(None).get_weights(), strict=True)
    assert max(np.abs(one - other).max() for one, other in pairs) > 1e-3
    keras.tree.assert_same_structure(found, expected)
    assert_alike(*map(keras.tree.flatten, (found, expected)), rtol=2e-5, atol=2e-6)


def stepping(model: Any, *optimizers: Any) -> Step:
    """A backward pass, and a step of each optimizer."""

    def step(x: Any, y: Any, rows: int) -> None:
        loss_of(model, x, y, rows).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_steps_as_on_one_device(strategy, name):
    def make_step(model: Any) -> Any:
        optimizer = OPTIMIZERS[name](model.parameters())
        norms: list[float] = []

        def step(x: Any, y: Any, rows: int) -> None:
            loss_of(model, x, y, rows).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()

        def after() -> Any:
            found = sorted({round(norm, 5) for norm in norms})
            norms.clear()
            assert len(found) == 1, found  # Of all replicas.
            return found, gradients(model)

        return step, after

    assert_trains_as_one_device(strategy, make_step)


def backward_twice(model: Any) -> Any:
    """Steps outside of `run`, after several backward passes in one run each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    counter = iter(range(1, 100))

    def step(x: Any, y: Any, rows: int) -> None:
        loss_of(model, x, y, rows).backward()
        (0.5 * loss_of(model, x, y, rows)).backward()

    def after() -> Any:
        found = gradients(model)
        if (number := next(counter)) % 2 == 0:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 2)
        return found

    return step, after


def accumulated(model: Any) -> Any:
    """Backward passes in several runs, and a step in a run of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    runs = iter(range(1, 100))

    def step(x: Any, y: Any, rows: int) -> None:
        loss_of(model, x, y, rows).backward()

    def update() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2).add_(0.001)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def after() -> Any:
        found = gradients(model)
        if next(runs) % 2 == 0:
            current = getattr(model, "_keras_strategies_strategy", None)
            update() if current is None else current.run(update)
        return found, optimizer.param_groups[0]["lr"]

    return step, after


def two_steps_in_a_run(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step(x: Any, y: Any, rows: int) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, x, y, rows).backward()
            optimizer.step()

    return step, lambda: gradients(model)


def several_optimizers(model: Any) -> Any:
    first, *_, last = model.layers
    one = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.Adam(last.parameters(), lr=0.01)
    return stepping(model, one, other), lambda: len(other.state)


def parameters_in_the_loss(model: Any) -> Any:
    """What `backward()` adds to a parameter itself is summed, too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any, rows: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        squares = sum(p.pow(2).sum() for p in model.parameters())
        penalty = 0.1 * squares * len(x) / rows
        (loss_of(model, x, y, rows) + penalty).backward()
        optimizer.step()

    return step, lambda: gradients(model)


def hooks_of_parameters(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return stepping(model, optimizer), lambda: 0


def optimizer_of_keras(model: Any) -> Any:
    optimizer = keras.optimizers.Adam(0.02, weight_decay=0.1)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any, rows: int) -> None:
        model.zero_grad()
        loss_of(model, x, y, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        variables = model.trainable_variables
        optimizer.apply([v.value.grad for v in variables], variables)

    return step, lambda: gradients(model)


LOOPS = (
    *(backward_twice, accumulated, two_steps_in_a_run, several_optimizers),
    *(parameters_in_the_loss, hooks_of_parameters, optimizer_of_keras),
)


@pytest.mark.parametrize("make_step", LOOPS, ids=lambda fn: fn.__name__)
def test_a_loop_of_torch_trains_as_on_one_device(strategy, make_step):
    assert_trains_as_one_device(strategy, make_step)


def test_what_is_computed_from_sums_is_not_summed_in_silence(mirrored):
    model = make_model(mirrored)
    optimizer = keras.optimizers.SGD(0.1)
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(x: Any, y: Any, aggregated: bool) -> None:
        model.zero_grad()
        loss_of(model, x, y, 7).backward()
        found = [v.value.grad / 2 for v in variables]
        with ks.gradients_are_aggregated() if aggregated else contextlib.nullcontext():
            optimizer.apply(found, variables)

    x, y = (distributed(mirrored, each) for each in batches()[0])
    with pytest.raises(ks.errors.InvalidArgumentError, match="sums over all replicas"):
        mirrored.run(step, args=(x, y, False))
    before = model.get_weights()[0]
    mirrored.run(step, args=(x, y, True))
    assert np.abs(model.get_weights()[0] - before).max() > 1e-4


def test_a_closure_is_for_one_device(mirrored):
    def trained(strategy: Any) -> list[np.ndarray]:
        model = make_model(strategy)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        x, y = batches()[1]
        data = torch.from_numpy(x), torch.from_numpy(y)

        def step(x: Any, y: Any) -> None:
            def closure() -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, x, y, len(x))
                loss.backward()
                return loss

            optimizer.step(closure)

        step(*data) if strategy is None else strategy.run(step, args=data)
        return model.get_weights()  # type: ignore[no-any-return]

    found, expected = trained(ks.OneDeviceStrategy("cpu:0")), trained(None)
    assert_alike(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ks.errors.ContextError, match="LBFGS needs"):
        trained(mirrored)


def test_a_schedule_takes_values_that_are_equal_on_replicas(mirrored):
    model = make_model(mirrored)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    def step(value: Any) -> None:
        optimizer.step()
        schedule.step(value)

    for _ in range(3):
        mirrored.run(step, args=(2.0,))
    assert optimizer.param_groups[0]["lr"] == 1.0
    mirrored.run(step, args=(2.0,))
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ks.errors.InvalidArgumentError, match="differ between replicas"):
        mirrored.run(step, args=(ks.PerReplica([1.0, 2.0]),))


def test_gradients_of_second_order_are_an_error(mirrored):
    model = make_model(mirrored)

    def step(x: Any, y: Any) -> None:
        loss_of(model, x, y, 7).backward(create_graph=True)

    x, y = (distributed(mirrored, each) for each in batches()[0])
    with pytest.raises(ks.errors.ContextError, match="cannot be differentiated again"):
        mirrored.run(step, args=(x, y))


def test_a_failed_run_leaves_gradients_as_they_were(mirrored):
    model = make_model(mirrored)
    x, y = (distributed(mirrored, each) for each in batches()[0])
    mirrored.run(lambda x, y: loss_of(model, x, y, 7).backward(), args=(x, y))
    before = gradients(model)

    def step(x: Any, y: Any) -> None:
        loss_of(model, x, y, 7).backward()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        mirrored.run(step, args=(x, y))
    for one, other in zip(before, gradients(model), strict=True):
        np.testing.assert_array_equal(one, other)


def wrapping(strategy: Any, make: Callable[..., Any], *sizes: int) -> Any:
    """A model of one module of Torch, which is made in the scope."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        shape = (None, sizes[-1])
        layer = keras.layers.TorchModuleWrapper(make(*sizes), output_shape=shape)
        return keras.Sequential([keras.Input((3,)), layer])


def test_a_wrapped_module_of_torch_trains_as_on_one_device(strategy):
    def make(strategy: Any) -> Any:
        torch.manual_seed(4)
        return wrapping(strategy, torch.nn.Linear, 3, 4)

    def make_step(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def after() -> Any:
            kernel = model.layers[0].module.weight.detach().numpy()
            np.testing.assert_array_equal(kernel, model.get_weights()[0])
            return 0

        return stepping(model, optimizer), after

    assert_trains_as_one_device(strategy, make_step, make)


def test_buffers_of_a_torch_module_that_replicas_change_are_an_error(mirrored):
    model = wrapping(mirrored, torch.nn.BatchNorm1d, 3)
    x = distributed(mirrored, batches()[0][0])
    mirrored.run(lambda x: model(x, training=False), args=(x,))
    with pytest.raises(ks.errors.ContextError, match="changes its buffer"):
        mirrored.run(lambda x: model(x, training=True), args=(x,))
    mean = model.layers[0].module.running_mean
    np.testing.assert_array_equal(mean, np.zeros(3))


def test_replicas_differ_where_a_function_first_draws_in_a_later_call(mirrored):
    draws = False
    with mirrored.scope():
        seed = keras.random.SeedGenerator(3)

    def fn(x: Any) -> Any:
        return keras.random.uniform((len(x),), seed=seed) if draws else x

    keras.utils.set_random_seed(3)
    x = ks.PerReplica([torch.zeros(8), torch.zeros(8)])
    for _ in range(2):
        mirrored.run(fn, args=(x,))
    draws = True
    found = [part for _ in range(3) for part in mirrored.run(fn, args=(x,)).values]
    assert len({str(part.tolist()) for part in found}) == 6


def test_a_number_and_a_tensor_are_not_one_sum(mirrored):
    def fn(value: Any) -> Any:
        context = ks.get_replica_context()
        is_first = context.replica_id_in_sync_group == 0
        return context.all_reduce("SUM", 1.0 if is_first else value)

    with pytest.raises(ks.errors.ReplicaMismatchError, match="all_reduce of a number"):
        mirrored.run(fn, args=(torch.ones(()),))
