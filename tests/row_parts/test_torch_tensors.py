"""Outputs that stay on their replicas are tensors of the global batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("tensors of Torch", allow_module_level=True)

import torch
from row_parts.functions import TARGETS, X, compared, read, step_of


def array(value: Any) -> np.ndarray:
    is_tensor = isinstance(value, torch.Tensor)
    return np.asarray(value.detach().numpy() if is_tensor else value, "float64")


def gradients(model: Any, *losses: Any) -> list[Any]:
    return list(torch.autograd.grad(sum(losses), read(model)))


def loss_of(outputs: Any) -> Any:
    return keras.losses.MeanSquaredError()(TARGETS["real"], outputs)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 3 * gradient


def of_traits(y: Any, model: Any) -> Any:
    assert isinstance(y, torch.Tensor) and keras.ops.is_tensor(y)
    assert y.requires_grad and not y.is_leaf
    assert y.device == torch.device("cpu") and y.dtype == torch.float32
    assert y.is_contiguous() and y.stride() == (5, 1)
    assert y.ndim == y.dim() == 2
    return [len(y), *y.shape, y.numel(), y.nbytes, y.element_size()]


def of_operations(y: Any, model: Any) -> Any:
    return [y + 1, torch.exp(y), y @ y.T, y.reshape(-1), y.sum(0), y[2:7], y.T, -y]


def of_numbers(y: Any, model: Any) -> Any:
    plain = y.detach()
    return [
        plain.numpy(),
        np.asarray(plain),
        plain.tolist(),
        keras.ops.convert_to_numpy(y),
        float(plain.sum()),
        plain[3, 2].item(),
        [float(row.detach().sum()) for row in y],
        y.cpu(),
        y.to(torch.float64),
        torch.from_dlpack(plain),
    ]


def of_copies(y: Any, model: Any) -> Any:
    plain = y.detach()
    return [
        copy.deepcopy(plain),
        pickle.loads(pickle.dumps(plain)),
        plain.clone(),
        torch.tensor(plain.tolist()),
    ]


def of_changes(y: Any, model: Any) -> Any:
    first = model(X)
    first.mul_(2)
    first[3] = 0
    second = model(X)
    view = second.view(-1)
    view.add_(1)
    plain = model(X).detach()
    plain += 3
    total = loss_of(first), loss_of(second)
    return [first, second, view, plain, *total, *gradients(model, *total)]


def of_gradients(y: Any, model: Any) -> Any:
    seen = []
    y.register_hook(lambda gradient: seen.append(gradient + 0))
    y.retain_grad()
    total = loss_of(y)
    total.backward(retain_graph=True)
    [own] = torch.autograd.grad(loss_of(y), y, retain_graph=True)
    found = [v.value.grad.clone() for v in model.trainable_variables]
    model.zero_grad()
    return [*seen[:1], y.grad, own, *found]


def of_several_paths(y: Any, model: Any) -> Any:
    """Gradients of parts and of joined rows are added."""
    first = gradients(model, loss_of(y), y.square().mean())
    y = model(X)
    second = gradients(model, y.square().mean(), loss_of(y))
    y = model(X)
    third = gradients(model, loss_of(Doubled.apply(y)), loss_of(y))
    return [*first, *second, *third]


def of_second_order(y: Any, model: Any) -> Any:
    [inner] = torch.autograd.grad(loss_of(y), y, create_graph=True)
    return gradients(model, inner.square().sum(), loss_of(y))


def of_layers(y: Any, model: Any) -> Any:
    """Another layer call gets the parts."""
    again = model.dense(model(X)[:, :4])
    return [again, *gradients(model, loss_of(again))]


USES = (
    *(of_traits, of_operations, of_numbers, of_copies, of_changes, of_gradients),
    *(of_several_paths, of_second_order, of_layers),
)


@pytest.mark.filterwarnings("ignore:A gradient through layer")
@pytest.mark.parametrize("use", USES)
def test_uses(use: Any) -> None:
    def arrays(model: Any, x: Any, y: Any) -> list[np.ndarray]:
        with torch.enable_grad():
            return list(map(array, use(model(x), model)))

    compared(step_of(arrays), X, TARGETS["real"])
