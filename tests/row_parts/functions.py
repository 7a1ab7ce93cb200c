"""Losses and metrics of Keras on outputs that stay on their replicas.

`LOSSES` and `METRICS` list each of them with its arguments, and why it is not computed
by replicas, if so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

import keras_strategies as ks

ROWS, CLASSES, STEPS = 11, 5, 6
_rng = np.random.default_rng(0)
X = _rng.normal(size=(ROWS, 4)).astype("float32")
#: Rows of another length each, for masks.
SEQUENCES = _rng.normal(size=(ROWS, STEPS, 4)).astype("float32")
SEQUENCES[:, 4:] = 0
SEQUENCES[:5, 2:] = 0
WEIGHTS = _rng.uniform(size=(ROWS,)).astype("float32")
_NUMBERS = _rng.integers(0, CLASSES, ROWS)
_REAL = _rng.normal(size=(ROWS, CLASSES)).astype("float32")
TARGETS = {
    "numbers": _NUMBERS,
    "steps": _rng.integers(0, CLASSES, (ROWS, STEPS)),
    "one_hot": np.eye(CLASSES, dtype="float32")[_NUMBERS],
    "flags": _rng.integers(0, 2, (ROWS, CLASSES)).astype("float32"),
    "real": _REAL,
    "positive": np.abs(_REAL) + 0.1,
}


@dataclass(frozen=True)
class Function:
    """A loss or metric."""

    name: str
    targets: str = "real"
    activation: str = "linear"
    joined: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    calls_itself: bool = False

    def __str__(self) -> str:
        return self.name


def functions(
    targets: str, activation: str, *names: str, **given: Any
) -> list[Function]:
    return [Function(name, targets, activation, **given) for name in names]


# Looks whether all labels are 0 or 1.
LABELS = "is a branch that depends on rows"
_SUMS = "a sum over rows"
LOSSES = [
    *functions("flags", "sigmoid", "BinaryCrossentropy", "BinaryFocalCrossentropy"),
    *functions("flags", "sigmoid", "Dice", "Tversky", joined=_SUMS),
    *functions("flags", "linear", "Hinge", "SquaredHinge", joined=LABELS),
    *functions("one_hot", "softmax", "CategoricalCrossentropy"),
    *functions("one_hot", "softmax", "CategoricalFocalCrossentropy"),
    *functions("one_hot", "linear", "CategoricalHinge"),
    *functions("numbers", "softmax", "CategoricalGeneralizedCrossEntropy"),
    *functions("numbers", "softmax", "SparseCategoricalCrossentropy"),
    *functions("numbers", "linear", "Circle", joined="reads the value of a tensor"),
    *functions("real", "linear", "CosineSimilarity", "Huber", "LogCosh"),
    *functions("real", "linear", "MeanAbsoluteError", "MeanAbsolutePercentageError"),
    *functions("real", "linear", "MeanSquaredError"),
    *functions("positive", "softplus", "KLDivergence", "MeanSquaredLogarithmicError"),
    *functions("positive", "softplus", "Poisson"),
]
if hasattr(keras.losses, "SparseCategoricalFocalCrossentropy"):  # Of Keras 3.16.
    _NEWER = "SparseCategoricalFocalCrossentropy"
    LOSSES += functions("numbers", "softmax", _NEWER, calls_itself=True)

#: Arguments of metrics.
_COUNT = {"num_classes": CLASSES}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "IoU": {**_COUNT, "sparse_y_pred": False, "target_class_ids": [0, 1]},
    "MeanIoU": {**_COUNT, "sparse_y_pred": False},
    "OneHotIoU": {**_COUNT, "target_class_ids": [0]},
    "OneHotMeanIoU": _COUNT,
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
_METRICS: dict[tuple[str, str], str] = {
    ("flags", "sigmoid"): "AUC BinaryAccuracy BinaryCrossentropy BinaryIoU "
    "FalseNegatives FalsePositives Precision PrecisionAtRecall Recall "
    "RecallAtPrecision SensitivityAtSpecificity SpecificityAtSensitivity "
    "TrueNegatives TruePositives",
    ("one_hot", "softmax"): "CategoricalAccuracy CategoricalCrossentropy F1Score "
    "FBetaScore OneHotIoU OneHotMeanIoU",
    ("one_hot", "linear"): "Accuracy CategoricalHinge TopKCategoricalAccuracy",
    ("numbers", "softmax"): "IoU MeanIoU SparseCategoricalAccuracy "
    "SparseCategoricalCrossentropy",
    ("numbers", "linear"): "SparseTopKCategoricalAccuracy",
    ("real", "linear"): "ConcordanceCorrelation CosineSimilarity LogCoshError Mean "
    "MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError "
    "PearsonCorrelation R2Score RootMeanSquaredError Sum",
    ("positive", "softplus"): "KLDivergence MeanSquaredLogarithmicError Poisson",
}
METRICS = [
    *functions("flags", "linear", "Hinge", "SquaredHinge", joined=LABELS),
    *(
        Function(name, *outputs, arguments=_ARGUMENTS.get(name, {}))
        for outputs, names in _METRICS.items()
        for name in names.split()
    ),
]


def names_in(module: Any, base: type) -> set[str]:
    """The classes of a module of Keras; of several names of one class the first."""
    found: dict[Any, str] = {}
    for name, kind in sorted(vars(module).items()):
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
            found.setdefault(kind, name)
    return set(found.values())


class Rows(keras.Model):
    """A model whose step is `function(model, x, y, weights)`."""

    def __init__(self, activation: str, is_masked: bool = False):
        super().__init__()
        self.masking = keras.layers.Masking() if is_masked else None
        self.dense = keras.layers.Dense(CLASSES, activation=activation)
        self.function: Any = None

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x if self.masking is None else self.masking(x))

    def test_step(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        return self.function(self, x, y, weights)


def read(model: Any) -> list[Any]:
    return [v.value for v in model.trainable_variables]


def step_of(use: Any, *makers: Any) -> Any:
    """A maker of a step with the results of `use(model, x, y, *made)`, by number."""

    def make() -> Any:
        made = [each() for each in makers]

        def step(model: Any, x: Any, y: Any, weights: Any) -> dict[str, Any]:
            return {str(i): each for i, each in enumerate(use(model, x, y, *made))}

        return step

    return make


def loss_and_gradients(model: Any, loss: Any) -> tuple[Any, list[Any]]:
    """A loss, and its gradients of a model's trainable variables."""
    values = read(model)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            total = loss()
        return total, tape.gradient(total, values)
    import torch

    with torch.enable_grad():
        total = loss()
        return total.detach(), list(torch.autograd.grad(total, values))


def results(
    strategy: Any,
    make: Any,
    x: Any,
    y: Any,
    weights: Any = None,
    activation: str = "linear",
    is_masked: bool = False,
    batch_size: int = ROWS,
) -> dict[str, Any]:
    """The results of one step on all rows, or of the last on fewer rows."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Rows(activation, is_masked)
        model.build(x.shape)
        model.compile()
        model.function = make()
    options = {"batch_size": batch_size, "verbose": 0, "return_dict": True}
    return dict(model.evaluate(x, y, sample_weight=weights, **options))


def compared(*arguments: Any, count: int = 3, **options: Any) -> None:
    """Several replicas have the results of one device, of the same step."""
    expected = results(ks.OneDeviceStrategy("cpu:0"), *arguments, **options)
    devices = [f"cpu:{i}" for i in range(count)]
    found = results(ks.MirroredStrategy(devices), *arguments, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Of all rows and weights; single gradients can cancel.
        np.testing.assert_allclose(
            found[name], value, rtol=2e-5, atol=2e-6, err_msg=name
        )
