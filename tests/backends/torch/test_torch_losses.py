"""Losses of tokens and pixels on replicas are those of Keras."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keras_strategies.keras_compat.backends import keras_on_torch
from keras_strategies.keras_compat.patching import resolved

WORDS = 11
_TORCH = "keras.src.backend.torch"


def keras_loss(target: Any, output: Any, **options: Any) -> Any:
    nn = resolved(f"{_TORCH}.nn") or resolved(f"{_TORCH}.ops.nn")
    return nn.sparse_categorical_crossentropy(target, output, **options)


def own_loss(target: Any, output: Any, **options: Any) -> Any:
    return keras_on_torch.sparse_categorical_crossentropy(
        keras_loss, target, output, **options
    )


def data(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, WORDS, shape), torch.randn(*shape, WORDS)


@pytest.mark.parametrize(
    ("shape", "from_logits"),
    [((4,), True), ((4, 5), True), ((2, 3, 4), True), ((0, 5), True), ((4, 5), False)],
)
@pytest.mark.parametrize("has_axis", [False, True], ids=["labels", "labels with axis"])
def test_losses_are_those_of_keras(
    shape: Any, has_axis: bool, from_logits: bool
) -> None:
    target, output = data(shape)
    if target.numel():
        # Left out by Torch.
        target.view(-1)[0] = -100
    if has_axis:
        target = target[..., None]
    if not from_logits:
        output = output.softmax(-1)
    found = []
    for loss in (keras_loss, own_loss):
        leaf = output.clone().requires_grad_()
        values = loss(target, leaf, from_logits=from_logits)
        values.square().sum().backward()
        found.append((values.detach(), leaf.grad))
    for expected, own in zip(*found, strict=True):
        assert own.shape == expected.shape
        torch.testing.assert_close(own, expected)


def test_other_shapes_are_the_error_of_keras() -> None:
    target, output = data((4, 5))
    with pytest.raises(ValueError, match="must have the same shape up until"):
        own_loss(target[:, 1:], output, from_logits=True)
