"""N replicas compute what one device computes on the same global batch.

Each case below is trained once without a strategy and once under each of several,
and everything that a person can see is compared: histories, weights, optimizer
variables, `evaluate`, `predict`. By default `fit` gets 22 rows in batches of 8, so that
the last batch is not a whole one; so do `evaluate` and `predict` in the cases of data
and sizes.

The fast part trains the cases that are not `slow` on two mirrored replicas, and those
with `also` under the strategies named there. The full part adds the slow cases, and
trains every case under one more strategy: on Torch, and on JAX or TensorFlow in turn.
On Torch all but compiled ones are also trained under `MirroredStrategy` as users write
it, which does not split calls of models this small; those of models in the fast part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from harness import custom_steps, data, models
from harness.data import Data, take
from harness.strategies import STRATEGIES
from harness.training import (
    ADAM_TOLERANCE,
    Case,
    Results,
    assert_same,
    assert_same_training,
    differences,
    fit_evaluate_predict,
    state_of,
)
from keras import losses, metrics, ops, optimizers

BACKEND = keras.backend.backend()
TORCH = BACKEND == "torch"
EVERYWHERE = ("one_device", "mirrored_4", "central")


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
    """A metric whose state is a maximum, not a sum."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, "float32") - y_pred))
        self.value.assign(ops.maximum(self.value, error))

    def result(self):
        return ops.convert_to_tensor(self.value)


# --- Other ways to train ------------------------------------------------------


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


def fit_twice(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """The second `fit` goes on where the first one ended."""
    first = fit_evaluate_predict(case, model, all_rows)
    second = model.fit(
        all_rows.x, all_rows.y, batch_size=8, initial_epoch=2, epochs=4, verbose=0
    )
    return {**first, "second": second.history, "epochs": second.epoch}


def fit_then_state(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """What is there after `fit`, before anything else is called.

    Keras 3.15 on JAX lets the weights and their moving averages share memory at the
    end of `fit`, and its next program on one device takes it away from one of them.
    """
    history = model.fit(
        all_rows.x, all_rows.y, batch_size=case.batch, epochs=case.epochs, verbose=0
    )
    return {"history": history.history, **state_of(model)}


def compile_twice(case: Case, model: keras.Model, all_rows: Data) -> Results:
    first = fit_evaluate_predict(case, model, all_rows)
    nesterov = optimizers.SGD(0.05, momentum=0.5, nesterov=True)
    model.compile(nesterov, "poisson", metrics=["mae"])
    return {"first": first, "second": fit_evaluate_predict(case, model, all_rows)}


# --- Pieces of cases ----------------------------------------------------------


def regression(name: str, **kwargs: Any) -> Case:
    given = {"data": data.regression, "model": models.linear, "loss": lambda: "mse"}
    return Case(name, **{**given, **kwargs})


def binary(name: str, *chosen: Any, **kwargs: Any) -> Case:
    """A metric of two classes, weighted and not."""
    return Case(
        name,
        model=models.logistic,
        data=data.binary,
        loss=lambda: "binary_crossentropy",
        metrics=lambda: [make() for make in chosen],
        **kwargs,
    )


def with_optimizer(name: str, make: Any, **kwargs: Any) -> Case:
    return Case(name, optimizer=make, **kwargs)


def validation(rows: Data) -> Data:
    return take(rows, slice(0, 11))


# --- The cases ----------------------------------------------------------------

DATA = [
    Case("arrays", also=EVERYWHERE),
    Case("tensors", feed=data.tensors, also=("central",)),
    Case("pandas", feed=data.pandas_frames, sample_weight=True),
    Case("tf_data", feed=data.tf_data, sample_weight=True, also=("mirrored_4",)),
    Case("data_loader", feed=data.loader, sample_weight=True),
    Case("py_dataset", feed=data.py_dataset, sample_weight=True),
    Case("py_dataset_2_workers", feed=data.py_dataset_2_workers, epochs=1),
    Case("generator", feed=data.generator, epochs=1, sample_weight=True),
    Case("generator_endless", feed=data.endless),
    Case(
        "dict_inputs",
        model=models.two_towers,
        data=data.named,
        loss=lambda: {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]},
        also=("central",),
    ),
    Case(
        "dict_inputs_tf_data",
        model=models.two_towers,
        data=data.named,
        feed=data.tf_data,
        loss=lambda: {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        slow=True,
    ),
    Case("tuple_inputs", model=models.pair, data=data.paired, loss=lambda: "mse"),
    Case("nested_inputs", model=models.nested, data=data.nested, loss=lambda: "mse"),
    Case(
        "nested_inputs_data_loader",
        model=models.nested,
        data=data.nested,
        feed=data.loader,
        loss=lambda: "mse",
        # A loader makes lists of tuples, which tf.data does not take.
        refused_by={"tensorflow": TypeError},
        slow=True,
    ),
]

SIZES = [
    Case("size_23", rows=23, sample_weight=True, slow=True),
    Case("size_25", rows=25, sample_weight=True, also=("mirrored_4",)),
    Case("size_3", rows=3, metrics=lambda: ["accuracy"], also=("mirrored_4",)),
    Case("size_1", rows=1, also=("mirrored_4", "central")),
    Case("size_7", rows=7, slow=True),
    Case("size_16", rows=16, slow=True),
    Case("size_3_bn", rows=3, model=models.dense_bn, also=("mirrored_4",)),
    Case("size_25_bn", rows=25, model=models.dense_bn, also=("mirrored_4",)),
    Case("batch_1", rows=5, batch=1, slow=True),
    Case("batch_1_bn", rows=3, batch=1, model=models.dense_bn, slow=True),
    Case("size_25_data_loader", rows=25, feed=data.loader, slow=True),
    Case("size_25_tf_data", rows=25, feed=data.tf_data, slow=True),
    Case("size_1_generator", rows=1, feed=data.generator, epochs=1, slow=True),
]

LOSSES = [
    regression(
        f"loss_{reduction}",
        loss=lambda reduction=reduction: losses.MeanSquaredError(reduction=reduction),
        optimizer=lambda: optimizers.SGD(0.01),
        sample_weight=True,
        slow=reduction == "mean",
        also=("mirrored_4",) if reduction == "mean_with_sample_weight" else (),
    )
    for reduction in ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")
] + [
    Case(
        "loss_categorical_smoothed",
        data=data.one_hot,
        loss=lambda: losses.CategoricalCrossentropy(label_smoothing=0.1),
        slow=True,
    ),
    Case(
        "loss_focal",
        model=models.logistic,
        data=data.binary,
        loss=lambda: losses.BinaryFocalCrossentropy(apply_class_balancing=True),
        slow=True,
    ),
    regression("loss_huber", loss=lambda: "huber", slow=True),
    regression("loss_cosine", loss=lambda: "cosine_similarity", slow=True),
    regression("loss_function_per_sample", loss=lambda: per_sample, sample_weight=True),
    regression("loss_function_scalar", loss=lambda: scalar_of_batch),
    regression("loss_contrastive", loss=lambda: contrastive, also=("central",)),
    Case(
        "loss_weights",
        model=models.two_towers,
        data=data.named,
        loss=lambda: {"kind": "sparse_categorical_crossentropy", "size": "huber"},
        compile={"loss_weights": {"kind": 0.3, "size": 2.0}},
    ),
    Case("regularizers", model=models.regularized, rows=23, also=("mirrored_4",)),
    Case("activity_regularizer", model=models.activity_regularized, rows=23),
    Case("add_loss_mean", model=lambda: models.adds_loss("mean"), rows=23),
    Case("add_loss_sum", model=lambda: models.adds_loss("sum"), rows=23),
    Case(
        "add_loss_mean_sum_penalty",
        model=models.adds_two_losses,
        rows=25,
        sample_weight=True,
        also=("mirrored_4", "central"),
    ),
]

METRICS = [
    Case(
        "accuracy",
        metrics=lambda: ["accuracy"],
        weighted_metrics=lambda: ["accuracy"],
        sample_weight=True,
        also=("central",),
    ),
    binary("auc", metrics.AUC, rows=23, also=("mirrored_4",)),
    binary("precision_recall", metrics.Precision, metrics.Recall),
    binary(
        "binary_counts",
        metrics.TruePositives,
        metrics.FalseNegatives,
        lambda: metrics.PrecisionAtRecall(0.5),
        slow=True,
    ),
    Case(
        "f1_score",
        data=data.one_hot,
        loss=lambda: "categorical_crossentropy",
        metrics=lambda: [metrics.F1Score(average="macro")],
    ),
    Case(
        "mean_iou",
        metrics=lambda: [metrics.MeanIoU(3, sparse_y_pred=False)],
        slow=True,
    ),
    regression(
        "r2_rmse",
        metrics=lambda: [metrics.R2Score(), metrics.RootMeanSquaredError()],
        rows=25,
    ),
    regression(
        "weighted_metrics",
        weighted_metrics=lambda: ["mae", metrics.RootMeanSquaredError()],
        sample_weight=True,
        slow=True,
    ),
    regression("metric_maximum", metrics=lambda: [Largest()], also=("mirrored_4",)),
    regression("metric_function", metrics=lambda: [largest_error, "mae"]),
    Case(
        "metrics_per_output",
        model=models.two_towers,
        data=data.named,
        loss=lambda: {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        metrics=lambda: {"kind": "accuracy", "size": [metrics.R2Score(), "mae"]},
        slow=True,
    ),
]

MODELS = [
    Case("sequential_unbuilt", model=models.unbuilt, also=("central",)),
    Case(
        "conv_bn",
        model=models.conv,
        data=data.images,
        rows=23,
        also=EVERYWHERE,
    ),
    Case("dense_bn_weights", model=models.dense_bn, sample_weight=True, slow=True),
    Case("shared_layer", model=models.shared_layer, slow=True),
    Case("subclassed", model=models.Subclassed, rows=23, also=("mirrored_4",)),
    Case("subclassed_tf_data", model=models.Subclassed, feed=data.tf_data, slow=True),
    Case("lstm_mask", model=models.lstm, data=data.tokens),
    Case(
        "gru_mask_in_loss",
        model=models.gru_tagger,
        data=data.tagged,
        metrics=lambda: ["accuracy"],
        rows=23,
        also=("mirrored_4",),
    ),
    Case(
        "gru_mask_in_loss_weighted",
        model=models.gru_tagger,
        data=data.tagged,
        sample_weight=True,
        weighted_metrics=lambda: ["accuracy"],
        slow=True,
    ),
    Case("masked_bn", model=models.masked_bn, data=data.tokens, also=("mirrored_4",)),
    Case("transformer", model=models.transformer, data=data.tokens),
    Case("counting_layer", model=models.counting, slow=True),
    Case("spectral_normalization", model=models.spectral, rows=23),
    Case(
        "tied_embeddings",
        model=models.tied,
        data=data.tagged,
        slow=not TORCH,
    ),
    Case(
        "position_embedding",
        model=models.with_positions,
        data=data.tagged,
        slow=not TORCH,
    ),
    Case("frozen", model=models.frozen, slow=not TORCH),
    Case("int8", model=models.quantized, slow=not TORCH),
    regression(
        "custom_step",
        model=custom_steps.CustomLoss,
        loss=lambda: None,
        also=("mirrored_4",),
    ),
    regression(
        "custom_step_submodels",
        model=custom_steps.AutoEncoder,
        loss=lambda: None,
        rows=23,
    ),
    regression(
        "custom_step_two_players",
        model=custom_steps.TwoPlayers,
        loss=lambda: None,
    ),
    regression("custom_predict_step", model=custom_steps.SpreadOfTheBatch),
]

OPTIMIZERS = [
    with_optimizer("sgd_plain", lambda: optimizers.SGD(0.1), slow=True),
    with_optimizer(
        "adam",
        lambda: optimizers.Adam(0.01),
        tolerance=ADAM_TOLERANCE,
        also=("mirrored_4", "central"),
    ),
    with_optimizer(
        "adamw",
        lambda: optimizers.AdamW(0.01, weight_decay=0.1),
        tolerance=ADAM_TOLERANCE,
        slow=True,
    ),
    with_optimizer("rmsprop", lambda: optimizers.RMSprop(0.01), slow=True),
    with_optimizer(
        "weight_decay", lambda: optimizers.SGD(0.1, weight_decay=0.05), slow=True
    ),
    with_optimizer("clipnorm", lambda: optimizers.SGD(0.1, clipnorm=0.1)),
    with_optimizer(
        "global_clipnorm",
        lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
        also=("central",),
    ),
    with_optimizer("clipvalue", lambda: optimizers.SGD(0.1, clipvalue=0.01)),
    with_optimizer(
        "ema",
        lambda: optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
        ),
        script=fit_then_state,
    ),
    with_optimizer(
        "ema_at_end",
        lambda: optimizers.SGD(0.1, use_ema=True),
        script=fit_then_state,
        slow=True,
    ),
    with_optimizer(
        "gradient_accumulation",
        lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        rows=25,
        also=("central",),
    ),
    with_optimizer(
        "learning_rate_schedule",
        lambda: optimizers.SGD(
            optimizers.schedules.ExponentialDecay(0.2, 2, 0.5, staircase=True)
        ),
        slow=True,
    ),
    with_optimizer(
        "loss_scale",
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.1), initial_scale=2.0**10, dynamic_growth_steps=2
        ),
        slow=True,
    ),
    # Sums in half precision depend on their order: 11 and 8 bits of mantissa.
    Case(
        "mixed_float16",
        policy="mixed_float16",
        optimizer=lambda: optimizers.SGD(0.1),
        tolerance=2**-8,
    ),
    # On one device gradients overflow for the first steps, which are skipped. Halves
    # of a batch overflow later; one device that computes a batch in two halves, and
    # rounds their sum as it does the gradient of a batch, is 3e-4 off.
    regression(
        "mixed_float16_skips",
        data=data.large_targets,
        policy="mixed_float16",
        optimizer=lambda: optimizers.SGD(1e-3),
        tolerance=2**-8,
        also=("mirrored_4", "central"),
    ),
    Case(
        "mixed_bfloat16",
        model=models.conv,
        data=data.images,
        policy="mixed_bfloat16",
        optimizer=lambda: optimizers.SGD(0.1),
        tolerance=2**-6,
    ),
]

FIT_OPTIONS = [
    Case("sample_weight", sample_weight=True, rows=23, also=("mirrored_4",)),
    Case(
        "class_weight",
        fit=lambda rows: {"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}},
        also=("central",),
    ),
    Case(
        "validation_split",
        rows=32,
        fit=lambda rows: {"validation_split": 0.3},
        metrics=lambda: ["accuracy"],
        sample_weight=True,
    ),
    Case(
        "validation_data",
        model=models.dense_bn,
        fit=lambda rows: {
            "validation_data": (validation(rows).x, validation(rows).y),
            "validation_batch_size": 4,
        },
        also=("mirrored_4",),
    ),
    Case(
        "validation_weights",
        sample_weight=True,
        fit=lambda rows: {
            "validation_data": tuple(vars(validation(rows)).values()),
            "validation_freq": 2,
        },
        slow=True,
    ),
    Case("shuffle", fit=lambda rows: {"shuffle": True}, slow=True),
    Case(
        "steps_per_execution",
        rows=39,
        scores_by_batch=True,
        metrics=lambda: ["accuracy"],
        compile={"steps_per_execution": 3},
        # Keras refuses more than one step on Torch; what is logged is the same.
        compile_alone={"steps_per_execution": 1} if TORCH else {},
        also=("mirrored_4", "central"),
    ),
    Case(
        "steps_per_execution_bn_weights",
        rows=39,
        scores_by_batch=True,
        model=models.dense_bn,
        sample_weight=True,
        compile={"steps_per_execution": 3},
        compile_alone={"steps_per_execution": 1} if TORCH else {},
        slow=True,
    ),
    # One shape only: a compiler of C++ needs long for each on Torch.
    Case("jit_compile", rows=16, compile={"jit_compile": True}, slow=True),
    Case("no_jit_compile", compile={"jit_compile": False}, slow=True),
    Case("run_eagerly", compile={"run_eagerly": True}, model=models.dense_bn),
    Case(
        "on_batch",
        script=on_batches,
        metrics=lambda: ["accuracy"],
        sample_weight=True,
        also=("mirrored_4", "central"),
    ),
    Case("on_batch_bn", script=on_batches, model=models.dense_bn, slow=True),
    Case("initial_epoch", script=fit_twice),
    Case(
        "compile_twice",
        data=data.one_hot,
        loss=lambda: "categorical_crossentropy",
        script=compile_twice,
        slow=True,
    ),
]

# How rows are cut into batches, and what does not depend on it.
BATCHES = [replace(case, scores_by_batch=True) for case in (*DATA, *SIZES)]
CASES = [*BATCHES, *LOSSES, *METRICS, *MODELS, *OPTIMIZERS, *FIT_OPTIONS]


def _parameters() -> list[Any]:
    return list(_chosen())


def _chosen():
    turn = 0
    for case in CASES:
        chosen = {"mirrored_2": case.slow, **dict.fromkeys(case.also, case.slow)}
        others = [name for name in EVERYWHERE if name not in chosen]
        if others:
            # Where programs are compiled, which takes long, one of two backends does.
            if BACKEND == "torch" or ("jax", "tensorflow")[turn % 2] == BACKEND:
                # One device is the least likely to differ: it comes once in five.
                chosen[others[-1 if turn % 5 else 0]] = True
            turn += 1
        if TORCH and case.name != "jit_compile":
            chosen["mirrored_2_default"] = case.slow or case not in MODELS
        for name, slow in chosen.items():
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(case, name, marks=marks, id=f"{case.name}-{name}")


@pytest.mark.parametrize("case, strategy_name", _parameters())
def test_same_as_one_device(case: Case, strategy_name: str) -> None:
    assert_same_training(case, STRATEGIES[strategy_name].make())


@pytest.mark.parametrize("strategy_name", ["mirrored_2", "mirrored_4"])
def test_moving_averages_of_weights_survive_what_follows(strategy_name) -> None:
    """With EMA one goes on after `evaluate` as without it (see `fit_then_state`)."""
    found = []
    for name in ("one_device", strategy_name):
        keras.utils.set_random_seed(7)
        with STRATEGIES[name].make().scope():
            model = models.dense()
            averaging = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
            model.compile(averaging, "sparse_categorical_crossentropy")
        rows = data.classes(22)
        for _ in range(2):
            model.fit(rows.x, rows.y, batch_size=8, shuffle=False, verbose=0)
            model.evaluate(rows.x, rows.y, verbose=0)
        found.append(state_of(model))
    assert_same(found[0], found[1], 1e-5, strategy_name)


def _fit_with_dropout(strategy_name: str, seed: int) -> Results:
    with STRATEGIES[strategy_name].make().scope():
        keras.utils.set_random_seed(seed)
        model = models.dropout()
        model.compile("sgd", "sparse_categorical_crossentropy")
    # The initial weights are the same whatever the seed; the masks are not.
    model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.weights])
    rows = data.classes(22)
    model.fit(rows.x, rows.y, batch_size=8, shuffle=False, verbose=0)
    return state_of(model)["weights"]


@pytest.mark.parametrize(
    "strategy_name",
    ["mirrored_2", *(pytest.param(n, marks=pytest.mark.slow) for n in EVERYWHERE)],
)
def test_dropout_repeats_with_the_seed(strategy_name) -> None:
    first = _fit_with_dropout(strategy_name, seed=1)
    assert_same(first, _fit_with_dropout(strategy_name, seed=1), 1e-6, strategy_name)
    assert list(differences(first, _fit_with_dropout(strategy_name, seed=2), 1e-3))


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)
