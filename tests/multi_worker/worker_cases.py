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


@dataclass(frozen=True)
class WorkerCase:
    """A case, its cluster, and why it is here."""

    case: Case
    cluster: str
    reason: str
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


def made(name: str, **kwargs: Any) -> Case:
    return Case(name, module="multi_worker.worker_cases", **kwargs)


def one_size(name: str, **kwargs: Any) -> Case:
    return made(name, **{"rows": ROWS, "batch": BATCH, "script": fit_only, **kwargs})


_ROWS = [
    WorkerCase(
        made(
            "arrays",
            scores_by_batch=True,
            sample_weight=True,
            metrics=lambda: ["accuracy"],
            weighted_metrics=lambda: ["accuracy"],
        ),
        "two",
        "a smaller last batch in fit, evaluate and predict; weights of rows",
    ),
    WorkerCase(
        made("size_3", rows=3, script=fit_only),
        "two",
        "fewer rows than a batch, more of them on worker 0",
        nightly_on=("jax", "tensorflow"),
    ),
    WorkerCase(
        made("size_1", rows=1, scores_by_batch=True, optimized_graphs=True),
        "two_by_two",
        "worker 1 has no row at all, in fit, evaluate and predict",
    ),
    WorkerCase(
        made(
            "size_10_bn",
            rows=10,
            model=models.dense_bn,
            sample_weight=True,
            metrics=lambda: ["accuracy"],
            script=fit_only,
        ),
        "three",
        "worker 2 has no row in the last batch while two workers have one",
        nightly_on=("tensorflow",),
    ),
]
_MODELS = [
    WorkerCase(
        one_size("conv_bn", model=models.conv, data=data.images, optimized_graphs=True),
        "two_by_two",
        "statistics of a batch over the devices of each worker and over workers",
    ),
    WorkerCase(
        one_size("gru_mask_in_loss", model=models.gru_tagger, data=data.tagged),
        "two",
        "masks of outputs, and gradients of the rows of a table",
    ),
    WorkerCase(
        one_size("subclassed", model=models.Subclassed),
        "two",
        "variables that the first batch makes",
        nightly_on=("tensorflow",),
    ),
    WorkerCase(
        one_size("counting_layer", model=models.counting),
        "two",
        "state that a layer assigns in its call",
        nightly_on=("tensorflow",),
    ),
    WorkerCase(
        one_size("two_losses_and_a_penalty", model=models.adds_two_losses),
        "two_by_two",
        "losses that layers add, by mean and by sum",
    ),
    WorkerCase(
        one_size(
            "named_inputs",
            model=models.two_towers,
            data=data.named,
            loss=lambda: {
                "kind": losses.SparseCategoricalCrossentropy(reduction="sum"),
                "size": losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            },
            metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]},
            compile={"loss_weights": {"kind": 0.05, "size": 2.0}},
        ),
        "two",
        "structures of inputs and outputs; reductions by sum and by weights",
        nightly_on=("jax", "tensorflow"),
    ),
    WorkerCase(
        one_size(
            "two_players",
            model=custom_steps.TwoPlayers,
            data=data.regression,
            loss=lambda: None,
        ),
        "two",
        "a train_step of the user's: calls of submodels, two gradients, two updates",
    ),
]
_LOSSES_AND_METRICS = [
    WorkerCase(
        one_size(
            "loss_contrastive",
            model=models.linear,
            data=data.regression,
            loss=lambda: contrastive,
        ),
        "two",
        "a loss between rows of different workers",
    ),
    WorkerCase(
        one_size(
            "metric_states",
            model=models.logistic,
            data=data.binary,
            loss=lambda: "binary_crossentropy",
            metrics=lambda: [metrics.AUC(), Largest()],
        ),
        "two",
        "metrics with counts by threshold and a maximum as states",
        nightly_on=("tensorflow",),
    ),
]
_UPDATES = [
    WorkerCase(
        one_size(
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
        "two",
        "clipping of the sum of gradients; accumulators and averages of weights",
    ),
    # One device skips the first steps: their gradients overflow.
    WorkerCase(
        one_size(
            "mixed_float16_skips",
            model=models.linear,
            data=data.large_targets,
            loss=lambda: "mse",
            policy="mixed_float16",
            optimizer=lambda: optimizers.SGD(1e-3),
            epochs=6,
            tolerance=2**-8,
        ),
        "two",
        "an overflow in the rows of one worker skips the step of all",
    ),
]
_FIT = [
    WorkerCase(
        one_size(
            "validation",
            fit=lambda rows: {
                "validation_data": (rows.x[:11], rows.y[:11]),
                "validation_batch_size": 4,
                "class_weight": {0: 0.2, 1: 1.0, 2: 3.0},
            },
            metrics=lambda: ["accuracy"],
        ),
        "two",
        "validation between epochs; weights of classes",
        nightly_on=("tensorflow",),
    ),
    WorkerCase(
        one_size(
            "steps_per_execution",
            rows=5 * BATCH,
            compile={"steps_per_execution": 3},
            # Keras refuses more than one step on Torch; what is logged is the same.
            compile_alone=({"steps_per_execution": 1} if BACKEND == "torch" else {}),
        ),
        "two",
        "several steps in a program, fewer of them in the last one",
        nightly_on=("tensorflow",),
    ),
    WorkerCase(
        one_size("on_batch", script=on_batches, metrics=lambda: ["accuracy"], epochs=1),
        "two",
        "train_on_batch, test_on_batch and predict_on_batch",
        nightly_on=("tensorflow",),
    ),
    WorkerCase(
        one_size("run_eagerly", compile={"run_eagerly": True}, epochs=1),
        "two",
        "steps without a program",
        nightly_on=("jax",),
    ),
    WorkerCase(
        one_size("every_feed", script=fit_on_every_feed),
        "two",
        "datasets of which workers compare each batch",
        nightly_on=("jax",),
    ),
]
WORKER_CASES = [*_ROWS, *_MODELS, *_LOSSES_AND_METRICS, *_UPDATES, *_FIT]
# For `harness.references`.
CASES = [
    replace(each.case, nightly=BACKEND in each.nightly_on) for each in WORKER_CASES
]
