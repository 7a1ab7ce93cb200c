"""What `make test` trains under strategies: one case for each mechanism.

A case combines what is independent of each other: losses, each of an output of its own;
metrics, reported one by one; data in all forms, one after the other. Each of these
things has a case of its own in `exactness.single_cases`, for the nightly run.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import keras
from exactness import custom_steps
from harness import data, models
from harness.case import (
    ADAM_TOLERANCE,
    Case,
    Results,
    state_of,
)
from harness.data import Data, take
from keras import losses, metrics, ops, optimizers

BACKEND = keras.backend.backend()
TORCH = BACKEND == "torch"


# --- Losses and metrics of users ----------------------------------------------


def per_sample(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


def scalar_of_batch(y_true, y_pred):
    """A mean over the batch, times something that only the whole batch has."""
    return ops.mean(ops.square(y_true - y_pred)) * (1.0 + ops.std(y_pred))


def contrastive(y_true, y_pred):
    """Each row is to be most similar to its own target among those of the batch."""
    similar = ops.matmul(y_pred, ops.transpose(y_true))
    rows = ops.arange(ops.shape(similar)[0])
    return losses.sparse_categorical_crossentropy(rows, similar, from_logits=True)


def largest_error(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


class Largest(metrics.Metric):
    """A metric with a maximum as state, not a sum."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, "float32") - y_pred))
        self.value.assign(ops.maximum(self.value, error))

    def result(self):
        return ops.convert_to_tensor(self.value)


# --- Other ways to train ------------------------------------------------------


def fit_only(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """`fit`, for what `evaluate` and `predict` have no part in."""
    given = case.feed(all_rows, case.batch)
    options = {"epochs": case.epochs, "verbose": 0, "shuffle": False}
    history = model.fit(**options, **given, **case.fit(all_rows))
    return {"history": history.history}


def fit_traced(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """`fit` with `jit_compile=True`; on Torch without the compiler of C++.

    TorchDynamo traces the step, which is where strategies matter. TorchInductor would
    take half a minute more; the nightly run has it (`exactness.single_cases`).
    """
    if not TORCH:
        return fit_only(case, model, all_rows)
    import torch

    traced = functools.partial(torch.compile, backend="eager")
    with mock.patch("torch.compile", traced):
        return fit_only(case, model, all_rows)


# A generator comes last: see `harness.case.without_phantom_step`.
FEEDS = {
    "arrays": data.arrays,
    "tensors": data.tensors,
    "tf_data": data.tf_data,
    "data_loader": data.loader,
    "py_dataset": data.py_dataset,
    "py_dataset_2_workers": data.py_dataset_2_workers,
    "endless": data.endless,
    "generator": data.generator,
}


def each_feed(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """An epoch from each form of data, and the weights after it."""
    found: Results = {}
    for name, feed in FEEDS.items():
        if name == "generator":
            found["optimizer"] = state_of(model)["optimizer"]
        given = feed(all_rows, case.batch)
        if "steps" in given:
            given["steps_per_epoch"] = given.pop("steps")
        history = model.fit(**given, epochs=1, verbose=0, shuffle=False)
        found[name] = {"history": history.history, "weights": model.get_weights()}
    scored = data.py_dataset(all_rows, case.batch)
    found["evaluate"] = model.evaluate(**scored, verbose=0, return_dict=True)
    inputs = data.tf_data(Data(all_rows.x, None), case.batch)
    found["predict"] = model.predict(**inputs, verbose=0)
    return found


def each_size(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """Whole batches and a last row, fewer rows than replicas, a single row."""
    found: Results = {}
    for count in (25, 3, 1):
        rows = take(all_rows, slice(count))
        given = data.arrays(rows, case.batch)
        history = model.fit(**given, verbose=0, shuffle=False)
        scores = model.evaluate(**given, verbose=0, return_dict=True)
        outputs = model.predict(rows.x, batch_size=case.batch, verbose=0)
        found[str(count)] = {
            "history": history.history,
            "evaluate": scores,
            "predict": outputs,
            "weights": model.get_weights(),
        }
    return found


def on_batches(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """A loop of one's own over `train_on_batch` and its siblings."""
    logs: list[Any] = []
    for start in range(0, all_rows.rows, case.batch):
        batch = take(all_rows, slice(start, start + case.batch))
        given = {"y": batch.y, "sample_weight": batch.w}
        logs.append(model.train_on_batch(batch.x, **given, return_dict=True))
        logs.append(model.test_on_batch(batch.x, **given, return_dict=True))
        logs.append(model.predict_on_batch(batch.x))
    return {"logs": logs}


def compile_twice(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """Another optimizer, loss and metric after the first `fit`."""
    first = fit_only(case, model, all_rows)
    first |= state_of(model)
    nesterov = optimizers.SGD(0.05, momentum=0.5, nesterov=True)
    model.compile(nesterov, "poisson", metrics=["mae"])
    return {"first": first, "second": fit_only(case, model, all_rows)}


def fit_then_state(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """What is there after `fit`, before anything else is called.

    Keras 3.15 on JAX lets the weights and their moving averages share memory at the
    end of `fit`, and its next program on one device takes it away from one of them.
    """
    return {**fit_only(case, model, all_rows), **state_of(model)}


def fit_options(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """Two calls of `fit` with all that it can be told, the second from epoch 2."""
    first = model.fit(
        all_rows.x,
        all_rows.y,
        batch_size=case.batch,
        epochs=2,
        shuffle=True,
        class_weight={0: 0.2, 1: 1.0, 2: 3.0},
        validation_split=0.3,
        verbose=0,
    )
    after_first = model.get_weights()
    held_back = take(all_rows, slice(0, 11))
    second = model.fit(
        all_rows.x,
        all_rows.y,
        sample_weight=all_rows.w,
        batch_size=case.batch,
        initial_epoch=2,
        epochs=4,
        validation_data=(held_back.x, held_back.y, held_back.w),
        validation_batch_size=4,
        validation_freq=2,
        verbose=0,
    )
    return {
        "first": first.history,
        "weights after it": after_first,
        "second": second.history,
        "epochs": second.epoch,
    }


# --- Input, sizes, losses, metrics ----------------------------------------------

INPUT = [
    Case("feeds", script=each_feed, sample_weight=True),
    # Apart from the others: Keras makes columns of its series, and on TensorFlow no
    # program of Keras is for targets of either rank.
    Case(
        "pandas_frames",
        feed=data.pandas_frames,
        sample_weight=True,
        epochs=1,
        script=fit_only,
    ),
    Case(
        "structures",
        model=models.structured,
        data=data.structured,
        loss=lambda: {"kind": "sparse_categorical_crossentropy", "size": "huber"},
        compile={"loss_weights": {"kind": 0.3, "size": 2.0}},
        metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]},
        epochs=1,
    ),
    Case(
        "sizes",
        optimized_graphs=True,
        rows=25,
        model=models.dense_bn,
        metrics=lambda: ["accuracy"],
        sample_weight=True,
        script=each_size,
    ),
    Case("size_3", rows=3, metrics=lambda: ["accuracy"], script=fit_only),
]

LOSSES = [
    Case(
        "losses",
        model=models.many_outputs,
        data=data.many_targets,
        rows=23,
        sample_weight=True,
        loss=lambda: {
            "a": losses.MeanSquaredError(reduction="sum_over_batch_size"),
            "b": losses.MeanSquaredError(reduction="sum"),
            "c": losses.MeanSquaredError(reduction="mean"),
            "d": losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            "e": "huber",
            "f": "cosine_similarity",
            "g": per_sample,
            "smoothed": losses.CategoricalCrossentropy(label_smoothing=0.1),
            "focal": losses.BinaryFocalCrossentropy(apply_class_balancing=True),
        },
        optimizer=lambda: optimizers.SGD(0.01),
        script=fit_only,
    ),
    Case(
        "losses_of_the_batch",
        model=models.pair_of_outputs,
        data=data.pair_of_targets,
        loss=lambda: {"scalar": scalar_of_batch, "contrastive": contrastive},
        script=fit_only,
    ),
    Case(
        "penalties",
        model=models.penalized,
        rows=23,  # A last batch of 4 rows and 3.
        sample_weight=True,
        optimizer=lambda: optimizers.SGD(0.01, momentum=0.9),
    ),
]

METRICS = [
    Case(
        "metrics",
        model=models.three_outputs,
        data=data.three_targets,
        rows=25,
        sample_weight=True,
        optimizer=lambda: optimizers.RMSprop(0.01),
        loss=lambda: {
            "binary": "binary_crossentropy",
            "numbers": "mse",
            "classes": "categorical_crossentropy",
        },
        metrics=lambda: {
            "binary": [
                metrics.AUC(),
                metrics.Precision(),
                metrics.Recall(),
                metrics.TruePositives(),
                metrics.FalseNegatives(),
                metrics.PrecisionAtRecall(0.5),
            ],
            "numbers": [
                metrics.R2Score(),
                metrics.RootMeanSquaredError(),
                Largest(),
                largest_error,
                "mae",
            ],
            "classes": [
                "accuracy",
                metrics.F1Score(average="macro"),
                metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False),
            ],
        },
        weighted_metrics=lambda: {
            "binary": [metrics.AUC()],
            "numbers": ["mae", metrics.RootMeanSquaredError()],
            "classes": ["accuracy"],
        },
        script=fit_only,
    )
]

# --- Models ---------------------------------------------------------------------

MODELS = [
    Case(
        "conv_bn",
        model=models.conv,
        data=data.images,
        rows=23,
        optimized_graphs=True,
    ),
    Case("subclassed", model=models.Subclassed, rows=23, script=fit_only),
    Case(
        "masked_tagger",
        model=models.masked_tagger,
        data=data.tagged,
        sample_weight=True,
        weighted_metrics=lambda: ["accuracy"],
        epochs=1,
        script=fit_only,
    ),
    Case(
        "tied_transformer",
        model=models.tied_transformer,
        data=data.tagged,
        epochs=1,
        script=fit_only,
    ),
    Case(
        "stateful_layers",
        model=models.stateful_layers,
        script=fit_only,
        optimized_graphs=True,
    ),
    Case("frozen", model=models.frozen, epochs=1, script=fit_only),
    Case("int8", model=models.quantized, epochs=1, script=fit_only),
    Case(
        "custom_steps",
        optimized_graphs=True,
        model=custom_steps.CustomSteps,
        data=data.regression,
        loss=lambda: None,
        rows=23,
    ),
    Case(
        "custom_step_two_players",
        model=custom_steps.TwoPlayers,
        data=data.regression,
        loss=lambda: None,
        script=fit_only,
    ),
]

# --- Optimizers -----------------------------------------------------------------

OPTIMIZERS = [
    Case(
        "adamw_schedule",
        optimizer=lambda: optimizers.AdamW(
            optimizers.schedules.ExponentialDecay(0.02, 2, 0.5, staircase=True),
            weight_decay=0.1,
        ),
        tolerance=ADAM_TOLERANCE,
        script=fit_only,
    ),
    Case(
        "clipnorm_decay",
        optimizer=lambda: optimizers.SGD(0.1, weight_decay=0.05, clipnorm=0.1),
        epochs=1,
        script=fit_only,
    ),
    Case(
        "clipvalue",
        optimizer=lambda: optimizers.SGD(0.1, clipvalue=0.01),
        epochs=1,
        script=fit_only,
    ),
    Case(
        "global_clipnorm_accumulation_ema",
        optimized_graphs=True,
        rows=39,
        optimizer=lambda: optimizers.SGD(
            0.1,
            momentum=0.9,
            global_clipnorm=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_momentum=0.8,
            ema_overwrite_frequency=2,
        ),
        script=fit_then_state,
    ),
    # On one device gradients overflow for the first steps, which are skipped. Halves
    # of a batch overflow later; one device that computes a batch in two halves, and
    # rounds their sum as it does the gradient of a batch, is 3e-4 off. Sums in half
    # precision depend on their order: 11 and 8 bits of mantissa.
    Case(
        "mixed_float16_skips",
        optimized_graphs=True,
        model=models.linear,
        loss=lambda: "mse",
        data=data.large_targets,
        policy="mixed_float16",
        optimizer=lambda: optimizers.SGD(1e-3),
        tolerance=2**-8,
        script=fit_only,
    ),
    Case(
        "mixed_bfloat16",
        model=models.conv,
        data=data.images,
        policy="mixed_bfloat16",
        optimizer=lambda: optimizers.SGD(0.1),
        tolerance=2**-6,
        script=fit_only,
    ),
]

# --- Options of `compile` and `fit`, and methods besides `fit` ------------------

OPTIONS = [
    Case("fit_options", rows=32, sample_weight=True, script=fit_options),
    Case(
        "steps_per_execution_bn_weights",
        optimized_graphs=True,
        rows=39,
        scores_by_batch=True,
        model=models.dense_bn,
        sample_weight=True,
        metrics=lambda: ["accuracy"],
        epochs=1,
        compile={"steps_per_execution": 3},
        # Keras refuses more than one step on Torch; what is logged is the same.
        compile_alone={"steps_per_execution": 1} if TORCH else {},
    ),
    # JAX compiles everything, and Torch nothing, unless they are told otherwise.
    Case(
        "jit_compile",
        rows=16,
        epochs=1,
        compile={"jit_compile": True},
        compile_alone={"jit_compile": False} if TORCH else {},
        script=fit_traced,
        # On JAX it is the default, and TorchDynamo takes half a minute.
        nightly=BACKEND != "tensorflow",
    ),
    # On JAX it is the same as `run_eagerly`.
    Case(
        "no_jit_compile",
        epochs=1,
        compile={"jit_compile": False},
        script=fit_only,
        nightly=BACKEND != "tensorflow",
    ),
    # One shape only: JAX compiles each operation for each.
    Case(
        "run_eagerly",
        rows=16,
        compile={"run_eagerly": True},
        model=models.dense_bn,
        epochs=1,
        script=fit_only,
    ),
    Case(
        "on_batch",
        optimized_graphs=True,
        model=models.unbuilt,
        script=on_batches,
        metrics=lambda: ["accuracy"],
        sample_weight=True,
    ),
    Case(
        "compile_twice",
        data=data.one_hot,
        loss=lambda: "categorical_crossentropy",
        epochs=1,
        script=compile_twice,
    ),
]

CASES = [*INPUT, *LOSSES, *METRICS, *MODELS, *OPTIMIZERS, *OPTIONS]
