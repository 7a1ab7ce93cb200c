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
    names = ["call"]
    bases = [
        base
        for base in kind.__mro__
        if base.__module__.startswith("keras.src.layers.")
        and base is not keras.layers.Layer
    ]
    for name in names:
        own = [methods_of(base)[name] for base in bases if name in methods_of(base)]
        for node in ast.walk(own[0]) if own else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                if isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                elif node.attr not in names:
                    names.append(node.attr)
    return found


def layer_classes() -> set[Any]:
    classes = set(filter(inspect.isclass, vars(keras.layers).values()))
    layer = keras.layers.Layer
    return {each for each in classes if issubclass(each, layer)} - {layer}


@pytest.mark.one_backend
def test_what_layers_write_in_a_call_is_known() -> None:
    """Where it is not, replicas of one process must not call the layer together."""
    written = {kind: written_in_calls(kind) for kind in layer_classes()}
    cells = {kind for kind, names in written.items() if names & MASKS}
    kinds = keras.layers
    assert cells == {kinds.GRUCell, kinds.LSTMCell, kinds.SimpleRNNCell}
    assert all(keeps_masks(kind(2)) for kind in cells)
    known = MASKS | HARMLESS
    assert not {kind: names - known for kind, names in written.items() if names - known}
