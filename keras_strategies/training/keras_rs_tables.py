"""Optimizers of the embedding tables of keras_rs."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import keras

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.layers import embedding_tables, sublayers
from keras_strategies.keras_compat.optimizers.optimizer_classes import optimizer_kind
from keras_strategies.keras_compat.optimizers.optimizer_parts import optimizers_of

#: Default of `TableConfig.optimizer` in keras_rs 0.4; equal to no optimizer given.
_DEFAULT = "adam"


def check_table_optimizers(model: Any) -> None:
    """Raises for a table of keras_rs with an optimizer that would not be used.

    keras_rs 0.4 uses `TableConfig.optimizer` on the SparseCores of TPUs. On other
    devices the model's optimizer updates all variables, without a warning.

    Raises:
        ValueError: if a table has another optimizer than the model.
    """
    keras_rs = sys.modules.get("keras_rs")
    # A model that was not compiled has none: Keras says what to do.
    optimizer = getattr(model, "optimizer", None)
    if keras_rs is None or optimizer is None:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, keras.optimizers.MultiOptimizer) and not optimizer.built:
        return
    present = optimizers_of(optimizer) or [optimizer]
    for layer in sublayers(model):
        if not isinstance(layer, keras_rs.layers.DistributedEmbedding):
            continue
        for table in embedding_tables(layer):
            wanted = table.optimizer
            if wanted == _DEFAULT or any(_is_equal(wanted, own) for own in present):
                continue
            raise InvalidArgumentError(
                f"Table {table.name!r} of layer {layer.name!r} has "
                f"optimizer={wanted!r}, which keras_rs uses on the SparseCores of TPUs "
                "only: here the optimizer of the model, "
                f"{optimizer_kind(optimizer).__name__}, would update it. Omit it, "
                "or compile the model with `keras.optimizers.MultiOptimizer`, which "
                "updates variables by their paths: "
                "`keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap("
                f'default, {{".*/{table.name}/.*": optimizer}}))`.'
            )


def _is_equal(wanted: Any, own: Any) -> bool:
    """Whether a table's optimizer, a name or an object, is that of the model."""
    kind = optimizer_kind(own)
    config = own.get_config()
    if isinstance(wanted, str):
        # By the defaults, without creating an optimizer, which would create variables.
        defaults = inspect.signature(kind.__init__).parameters
        return wanted.lower() == kind.__name__.lower() and all(
            name not in defaults or _is_close(defaults[name].default, value)
            for name, value in config.items()
            if name != "name"
        )
    if optimizer_kind(wanted) is not kind:
        return False
    other = wanted.get_config()
    return config.keys() == other.keys() and all(
        _is_close(value, other[name])
        for name, value in config.items()
        if name != "name"
    )


def _is_close(one: Any, other: Any) -> bool:
    """Whether two settings are equal; numbers in float32."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * abs(one)
    return bool(one == other)
