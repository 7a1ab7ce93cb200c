"""Losses and metrics of Keras on outputs that stay on their replicas.

`LOSSES` and `METRICS` list each of them with its arguments, and why it is not computed
by replicas, if so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

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


# Looks whether all labels are 0 or 1.
LABELS = "is a branch that depends on rows"
#: Of Keras 3.16.
#: Those that the lowest release of Keras has not; they are not on the page.
NEWER_LOSSES = (
    Function(
        "SparseCategoricalFocalCrossentropy", "numbers", "softmax", calls_itself=True
    ),
)
LOSSES = (
    Function("BinaryCrossentropy", "flags", "sigmoid"),
    Function("BinaryFocalCrossentropy", "flags", "sigmoid"),
    Function("CategoricalCrossentropy", "one_hot", "softmax"),
    Function("CategoricalFocalCrossentropy", "one_hot", "softmax"),
    Function("CategoricalGeneralizedCrossEntropy", "numbers", "softmax"),
    Function("CategoricalHinge", "one_hot"),
    Function("Circle", "numbers", joined="reads the value of a tensor"),
    Function("CosineSimilarity"),
    Function("Dice", "flags", "sigmoid", joined="a sum over rows"),
    Function("Hinge", "flags", joined=LABELS),
    Function("Huber"),
    Function("KLDivergence", "positive", "softplus"),
    Function("LogCosh"),
    Function("MeanAbsoluteError"),
    Function("MeanAbsolutePercentageError"),
    Function("MeanSquaredError"),
    Function("MeanSquaredLogarithmicError", "positive", "softplus"),
    Function("Poisson", "positive", "softplus"),
    Function("SparseCategoricalCrossentropy", "numbers", "softmax"),
    Function("SquaredHinge", "flags", joined=LABELS),
    Function("Tversky", "flags", "sigmoid", joined="a sum over rows"),
    *(loss for loss in NEWER_LOSSES if hasattr(keras.losses, loss.name)),
)

_COUNTS = {"num_classes": CLASSES, "sparse_y_pred": False}
METRICS = (
    Function("AUC", "flags", "sigmoid"),
    Function("Accuracy", "one_hot"),
    Function("BinaryAccuracy", "flags", "sigmoid"),
    Function("BinaryCrossentropy", "flags", "sigmoid"),
    Function("BinaryIoU", "flags", "sigmoid"),
    Function("CategoricalAccuracy", "one_hot", "softmax"),
    Function("CategoricalCrossentropy", "one_hot", "softmax"),
    Function("CategoricalHinge", "one_hot"),
    Function("ConcordanceCorrelation"),
    Function("CosineSimilarity"),
    Function("F1Score", "one_hot", "softmax"),
    Function("FBetaScore", "one_hot", "softmax"),
    Function("FalseNegatives", "flags", "sigmoid"),
    Function("FalsePositives", "flags", "sigmoid"),
    Function("Hinge", "flags", joined=LABELS),
    Function(
        "IoU", "numbers", "softmax", arguments={**_COUNTS, "target_class_ids": [0, 1]}
    ),
    Function("KLDivergence", "positive", "softplus"),
    Function("LogCoshError"),
    Function("Mean"),
    Function("MeanAbsoluteError"),
    Function("MeanAbsolutePercentageError"),
    Function("MeanIoU", "numbers", "softmax", arguments=_COUNTS),
    Function("MeanSquaredError"),
    Function("MeanSquaredLogarithmicError", "positive", "softplus"),
    Function(
        "OneHotIoU",
        "one_hot",
        "softmax",
        arguments={"num_classes": CLASSES, "target_class_ids": [0]},
    ),
    Function("OneHotMeanIoU", "one_hot", "softmax", arguments={"num_classes": CLASSES}),
    Function("PearsonCorrelation"),
    Function("Poisson", "positive", "softplus"),
    Function("Precision", "flags", "sigmoid"),
    Function("PrecisionAtRecall", "flags", "sigmoid", arguments={"recall": 0.5}),
    Function("R2Score"),
    Function("Recall", "flags", "sigmoid"),
    Function("RecallAtPrecision", "flags", "sigmoid", arguments={"precision": 0.5}),
    Function("RootMeanSquaredError"),
    Function(
        "SensitivityAtSpecificity", "flags", "sigmoid", arguments={"specificity": 0.5}
    ),
    Function("SparseCategoricalAccuracy", "numbers", "softmax"),
    Function("SparseCategoricalCrossentropy", "numbers", "softmax"),
    Function("SparseTopKCategoricalAccuracy", "numbers", arguments={"k": 2}),
    Function(
        "SpecificityAtSensitivity", "flags", "sigmoid", arguments={"sensitivity": 0.5}
    ),
    Function("SquaredHinge", "flags", joined=LABELS),
    Function("Sum"),
    Function("TopKCategoricalAccuracy", "one_hot", arguments={"k": 2}),
    Function("TrueNegatives", "flags", "sigmoid"),
    Function("TruePositives", "flags", "sigmoid"),
)


def classes_of(module: Any, base: type) -> set[str]:
    """The classes of a module of Keras that compute something."""
    return {
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


def first_of(module: Any, base: type) -> dict[str, Any]:
    """The classes of a module, by name; of several names of one class the first."""
    found: dict[Any, str] = {}
    for name in sorted(classes_of(module, base)):
        found.setdefault(getattr(module, name), name)
    return {name: kind for kind, name in found.items()}


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
        if self.masking is not None:
            x = self.masking(x)
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        return self.function(self, x, y, weights)


def loss_and_gradients(model: Any, loss: Any) -> tuple[Any, list[Any]]:
    """A loss, and its gradients of a model's trainable variables."""
    read = [v.value for v in model.trainable_variables]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            total = loss()
        return total, tape.gradient(total, read)
    import torch

    with torch.enable_grad():
        total = loss()
        return total.detach(), list(torch.autograd.grad(total, read))


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
    return dict(
        model.evaluate(
            x,
            y,
            sample_weight=weights,
            batch_size=batch_size,
            verbose=0,
            return_dict=True,
        )
    )
