"""Building of models from the shapes of a batch, before the first step."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategies.errors import InputError
from keras_strategies.keras_compat.variables.values import raw_value


def base_trainer() -> Any:
    """`Trainer` of Keras 3.15, which 3.16 calls `BaseTrainer`."""
    from keras.src.trainers import trainer

    return getattr(trainer, "BaseTrainer", None) or trainer.Trainer


def is_built(layer: Any) -> bool:
    """Whether a layer and all its sublayers have their variables.

    Keras 3.15: `Layer._flatten_layers`, as `Trainer._symbolic_build` uses it.
    """
    return all(map(operator.attrgetter("built"), layer._flatten_layers()))


def compiled_parts(model: Any) -> tuple[Any, Any]:
    """The metrics and the loss of `compile`; None before it is called.

    Keras 3.15: `Trainer._compile_metrics`, `_compile_loss`.
    """
    names = ("_compile_metrics", "_compile_loss")
    metrics, loss = (getattr(model, name, None) for name in names)
    return metrics, loss


def is_unbuilt(model: Any) -> bool:
    """Whether `Trainer._symbolic_build` of Keras 3.15 needs a batch."""
    parts = compiled_parts(model)
    unbuilt = [part for part in parts if part is not None and not part.built]
    return bool(unbuilt) or not is_built(model)


def empty_input() -> InputError:
    """The error for `fit`, `evaluate` and `predict` without a batch."""
    return InputError(
        "The input is empty: no batch can be read from it. Arrays without rows, a "
        "dataset whose filter leaves nothing, and a loader with `drop_last` and fewer "
        "rows than a batch have none. Pass at least one batch."
    )


def check_not_empty(epochs: Any) -> None:
    """Raises `InputError` if an epoch iterator is known to have no batch.

    Keras 3.15 raises errors of its parts, which differ by backend and input; on
    TensorFlow `fit` returns after no step.
    """
    if epochs.data_adapter.num_batches == 0:
        raise empty_input()


@contextlib.contextmanager
def empty_predictions() -> Iterator[None]:
    """Entered around Keras's `predict`: raises `InputError` if it reads no batch.

    Keras 3.15: `predict` uses `batch_outputs`, a local of its loop, after it.
    """
    try:
        yield
    except UnboundLocalError as error:
        if "'batch_outputs'" not in str(error):
            raise
        raise empty_input() from None


def creates_metrics(model: Any) -> bool:
    """Whether the first step of a compiled model makes variables of metrics.

    Keras 3.15: `CompileLoss` has a metric for each of several losses, none for one.
    """
    metrics, loss = model._compile_metrics, model._compile_loss
    is_new = metrics is not None and not metrics.built
    if loss is None or loss.built:
        return is_new
    outputs = getattr(model, "outputs", None) or [None]
    is_one = len(outputs) == 1 and not isinstance(loss._user_loss, (list, tuple, dict))
    return is_new or not is_one


def has_custom_step(model: Any) -> bool:
    """Whether a model's class defines what its steps do with a batch."""
    kind = type(model)
    names = ("train_step", "test_step", "predict_step", "compute_loss")
    own = [getattr(kind, name, None) for name in names]
    return own != [getattr(keras.Model, name) for name in names]


def element_spec(adapter: Any) -> Any:
    """The `element_spec` of the tf.data dataset behind an adapter, None without one.

    Keras 3.15: `TFDatasetAdapter._dataset`.
    """
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    if isinstance(adapter, TFDatasetAdapter):
        return adapter._dataset.element_spec
    return None


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds model, losses, metrics and optimizer from the shapes of a batch.

    Keras 3.15: `Trainer._symbolic_build(data_batch=...)`, which reads `shape` and
    `dtype` of the leaves only. It traces the model for the shapes of its outputs; a
    functional model has symbolic outputs already.
    """
    batch = keras.tree.map_structure(_with_strings, batch)
    outputs = _known_outputs(model)
    if outputs is not None:
        with contextlib.suppress(Exception):  # Keras's own build raises the error.
            _build_from_outputs(model, batch, outputs)
    model._symbolic_build(data_batch=batch)


def _with_strings(leaf: Any) -> Any:
    """A specification of an array of strings; other leaves unchanged."""
    if getattr(getattr(leaf, "dtype", None), "kind", "") in ("O", "S", "U"):
        return keras.KerasTensor(leaf.shape, "string")
    return leaf


def _known_outputs(model: Any) -> Any:
    """The symbolic outputs of a built functional model; None for other models."""
    if not (is_built(model) and model.compiled):
        return None
    kinds = (keras.Sequential, _functional_class())
    if not any(type(model).call is kind.call for kind in kinds):
        return None
    outputs = model.outputs if isinstance(model, keras.Sequential) else model.output
    if isinstance(outputs, list) and len(outputs) == 1:
        outputs = outputs[0]
    shapes = [leaf.shape for leaf in keras.tree.flatten(outputs)]
    # A metric's variables may depend on the last axis.
    is_known = all(shape and shape[-1] is not None for shape in shapes)
    return outputs if is_known else None


def _build_from_outputs(model: Any, batch: Any, outputs: Any) -> None:
    """Builds metrics and loss from symbolic outputs.

    Keras 3.15: `Trainer._compute_loss` is `compute_loss` of either signature.
    """
    from keras.src import backend

    def symbolic(leaf: Any) -> Any:
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor(leaf.shape, dtype)

    batch = keras.tree.map_structure(lambda v: v if v is None else symbolic(v), batch)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    metrics, loss = compiled_parts(model)
    outputs = keras.tree.map_structure(symbolic, outputs)
    if metrics is not None and not metrics.built:
        backend.compute_output_spec(
            model.compute_metrics, x, y, outputs, sample_weight=weights
        )
    if loss is not None and not loss.built:
        backend.compute_output_spec(
            model._compute_loss, x, y, outputs, sample_weight=weights, training=False
        )


def _functional_class() -> Any:
    from keras.src.models.functional import Functional

    return Functional


def all_variables(model: Any) -> list[Any]:
    """The variables of a model, its optimizer and its metrics, each once."""
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    found += getattr(model, "metrics_variables", [])
    unique = {id(variable): variable for variable in found}
    return [v for v in unique.values() if raw_value(v) is not None]


def given_metrics(model: Any) -> list[Any]:
    """The metrics and weighted metrics of `compile`, as they were given.

    Keras 3.15: `CompileMetrics._user_metrics`, `_user_weighted_metrics`.
    """
    metrics, _ = compiled_parts(model)
    if metrics is None:
        return []
    given = (metrics._user_metrics, metrics._user_weighted_metrics)
    return [each for each in keras.tree.flatten(given) if each is not None]


def compiled_variables(model: Any) -> list[Any]:
    """The variables of the optimizer and of the metrics of `compile`.

    Both may have been made before, and elsewhere.
    """
    found = list(getattr(getattr(model, "optimizer", None), "variables", []))
    for metric in given_metrics(model):
        if isinstance(metric, keras.metrics.Metric):
            found += metric.variables
    return [v for v in found if raw_value(v) is not None]


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables of a built model, with the paths of `fit`.

    Keras 3.15: on TensorFlow the first `Optimizer.apply` of `fit` makes them, in a
    scope of its name, which paths of an inner optimizer begin with.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built or not is_built(model):
        return
    if keras.backend.backend() != "tensorflow":
        optimizer.build(model.trainable_variables)
        return
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(model.trainable_variables)


def has_variables(metric: Any) -> bool:
    """Whether a metric has its variables; some make them in the first update."""
    return bool(getattr(metric, "_built", True))
