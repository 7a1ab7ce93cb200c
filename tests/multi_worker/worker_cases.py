"""What is trained on several workers: a case for each mechanism that workers share.

Each worker traces its own programs, so there are few of them: `fit` alone, on batches
of one size, unless the case is about something else. The workers' parts of a batch have
different sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import keras
from exactness import custom_steps
from exactness.cases import Largest, contrastive, fit_only, on_batches
from harness import data, models
from harness.case import Case, Results
from harness.data import Data
from keras import losses, metrics, optimizers

BACKEND = keras.backend.backend()
# Two batches of one size.
ROWS, BATCH = 14, 7
_TENSORFLOW = ("tensorflow",)
_BOTH = ("jax", "tensorflow")


@dataclass(frozen=True)
class WorkerCase:
    """A case and its cluster; a comment says why it is here."""

    case: Case
    cluster: str
    nightly_on: tuple[str, ...] = ()


def fit_on_every_feed(case: Case, model: keras.Model, rows: Data) -> Results:
    """One model on kinds of data that workers compare in different ways."""
    feeds = [data.tf_data, data.py_dataset]
    if BACKEND != "tensorflow":
        feeds += [data.loader, data.generator]
    return {
        feed.__name__: fit_only(replace(case, feed=feed, epochs=1), model, rows)
        for feed in feeds
    }


def on(
    cluster: str, name: str, nightly_on: tuple[str, ...] = (), **options: Any
) -> WorkerCase:
    """A case of `fit` alone with two batches of one size, but for what is given."""
    options = {"rows": ROWS, "batch": BATCH, "script": fit_only, **options}
    case = Case(name, module="multi_worker.worker_cases", **options)
    return WorkerCase(case, cluster, nightly_on)


def accuracy() -> list[str]:
    return ["accuracy"]


_ALL: dict[str, Any] = {"batch": 8, "script": None, "scores_by_batch": True}
_WEIGHTED: dict[str, Any] = {"sample_weight": True, "metrics": accuracy}
_ROWS = [
    # A smaller last batch in fit, evaluate and predict; weights of rows.
    on("two", "arrays", rows=22, **_ALL, **_WEIGHTED, weighted_metrics=accuracy),
    # Fewer rows than a batch, more of them on worker 0.
    on("two", "size_3", _BOTH, rows=3, batch=8),
    # Worker 1 has no row at all, in fit, evaluate and predict.
    on("two_by_two", "size_1", rows=1, **_ALL, optimized_graphs=True),
    # Worker 2 has no row in the last batch while two workers have one.
    on(
        "three",
        "size_10_bn",
        _TENSORFLOW,
        rows=10,
        batch=8,
        model=models.dense_bn,
        **_WEIGHTED,
    ),
]
_MODELS = [
    # Statistics of a batch over the devices of each worker and over workers.
    on(
        "two_by_two",
        "conv_bn",
        model=models.conv,
        data=data.images,
        optimized_graphs=True,
    ),
    # Masks of outputs, and gradients of the rows of a table.
    on("two", "gru_mask_in_loss", model=models.gru_tagger, data=data.tagged),
    # Variables that the first batch makes.
    on("two", "subclassed", _TENSORFLOW, model=models.Subclassed),
    # State that a layer assigns in its call.
    on("two", "counting_layer", _TENSORFLOW, model=models.counting),
    # Losses that layers add, by mean and by sum.
    on("two_by_two", "two_losses_and_a_penalty", model=models.adds_two_losses),
    # Structures of inputs and outputs; reductions by sum and by weights.
    on(
        "two",
        "named_inputs",
        _BOTH,
        model=models.two_towers,
        data=data.named,
        loss=lambda: {
            "kind": losses.SparseCategoricalCrossentropy(reduction="sum"),
            "size": losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        },
        metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]},
        compile={"loss_weights": {"kind": 0.05, "size": 2.0}},
    ),
    # A train_step of the user's: calls of submodels, two gradients, two updates.
    on(
        "two",
        "two_players",
        model=custom_steps.TwoPlayers,
        data=data.regression,
        loss=lambda: None,
    ),
]
_LOSSES_AND_METRICS = [
    # A loss between rows of different workers.
    on(
        "two",
        "loss_contrastive",
        model=models.linear,
        data=data.regression,
        loss=lambda: contrastive,
    ),
    # Metrics with counts by threshold and a maximum as states.
    on(
        "two",
        "metric_states",
        _TENSORFLOW,
        model=models.logistic,
        data=data.binary,
        loss=lambda: "binary_crossentropy",
        metrics=lambda: [metrics.AUC(), Largest()],
    ),
]
_UPDATES = [
    # Clipping of the sum of gradients; accumulators and averages of weights.
    on(
        "two",
        "clipped_accumulated_averaged",
        optimizer=lambda: optimizers.SGD(
            0.1,
            momentum=0.9,
            global_clipnorm=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_momentum=0.8,
        ),
    ),
    # An overflow in the rows of one worker skips the step of all. One device skips the
    # first steps: their gradients overflow.
    on(
        "two",
        "mixed_float16_skips",
        model=models.linear,
        data=data.large_targets,
        loss=lambda: "mse",
        policy="mixed_float16",
        optimizer=lambda: optimizers.SGD(1e-3),
        epochs=6,
        tolerance=2**-8,
    ),
]
_FIT = [
    # Validation between epochs; weights of classes.
    on(
        "two",
        "validation",
        _TENSORFLOW,
        fit=lambda rows: {
            "validation_data": (rows.x[:11], rows.y[:11]),
            "validation_batch_size": 4,
            "class_weight": {0: 0.2, 1: 1.0, 2: 3.0},
        },
        metrics=accuracy,
    ),
    # Several steps in a program, fewer of them in the last one. Keras refuses more than
    # one step on Torch; what is logged is the same.
    on(
        "two",
        "steps_per_execution",
        _TENSORFLOW,
        rows=5 * BATCH,
        compile={"steps_per_execution": 3},
        compile_alone={"steps_per_execution": 1} if BACKEND == "torch" else {},
    ),
    # train_on_batch, test_on_batch and predict_on_batch.
    on("two", "on_batch", _TENSORFLOW, script=on_batches, metrics=accuracy, epochs=1),
    # Steps without a program.
    on("two", "run_eagerly", ("jax",), compile={"run_eagerly": True}, epochs=1),
    # Datasets of which workers compare each batch.
    on("two", "every_feed", ("jax",), script=fit_on_every_feed),
]
WORKER_CASES = [*_ROWS, *_MODELS, *_LOSSES_AND_METRICS, *_UPDATES, *_FIT]
# For `harness.references`.
CASES = [
    replace(each.case, nightly=BACKEND in each.nightly_on) for each in WORKER_CASES
]
