"""Attributes that Keras's layers write in a call, which replica threads share."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import keras
import pytest

from keras_strategies.keras_compat.models.layers import keeps_masks

MASKS = {"_dropout_mask", "_recurrent_dropout_mask"}
#: Those that calls at the same time write alike.
HARMLESS = {
    # Of a pipeline of `tf.data`, by backend: written once.
    "_backend_generators",
    # `GroupQueryAttention`: a flag, an argument of the call.
    "_return_attention_scores",
}


@functools.cache
def methods_of(kind: type) -> dict[str, ast.FunctionDef]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}


def written_in_calls(kind: type) -> set[str]:
    """The attributes that `call` assigns, and methods of the class that it uses."""
    found: set[str] = set()
    seen: set[str] = set()
    remaining = ["call"]
    bases = [
        base
        for base in kind.__mro__
        if base.__module__.startswith("keras.src.layers.")
        and base is not keras.layers.Layer
    ]
    while remaining:
        name = remaining.pop()
        own = [methods_of(base)[name] for base in bases if name in methods_of(base)]
        if name in seen or not own:
            continue
        seen.add(name)
        for node in ast.walk(own[0]):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                if isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                else:
                    remaining.append(node.attr)
    return found


def layer_classes() -> list[Any]:
    members = vars(keras.layers).values()
    return [
        each
        for each in members
        if inspect.isclass(each)
        and issubclass(each, keras.layers.Layer)
        and each is not keras.layers.Layer
    ]


@pytest.mark.one_backend
def test_what_layers_write_in_a_call_is_known() -> None:
    """Where it is not, replicas of one process must not call the layer together."""
    written = {kind: written_in_calls(kind) for kind in layer_classes()}
    cells = {kind for kind, names in written.items() if names & MASKS}
    assert cells == {
        keras.layers.GRUCell,
        keras.layers.LSTMCell,
        keras.layers.SimpleRNNCell,
    }
    assert all(keeps_masks(kind(2)) for kind in cells)
    unknown = {
        kind.__name__: names - MASKS - HARMLESS
        for kind, names in written.items()
        if names - MASKS - HARMLESS
    }
    assert not unknown
