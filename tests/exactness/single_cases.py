"""A case for each loss, metric, optimizer, form of data and option.

`make test` trains combinations of them (`exactness.cases`); the nightly run trains each
of these too, and shows which of them differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
from exactness import custom_steps
from exactness.cases import (
    Largest,
    contrastive,
    fit_then_state,
    largest_error,
    on_batches,
    per_sample,
    scalar_of_batch,
)
from harness import data, models
from harness.case import ADAM_TOLERANCE, Case, Results, fit_evaluate_predict
from harness.data import Data, take
from keras import losses, metrics, optimizers

# Keras refuses more than one step on Torch; what is logged is the same.
TORCH = keras.backend.backend() == "torch"
ALONE = {"steps_per_execution": 1} if TORCH else {}


def fit_twice(case: Case, model: keras.Model, all_rows: Data) -> Results:
    """The second `fit` goes on where the first one ended."""
    first = fit_evaluate_predict(case, model, all_rows)
    second = model.fit(
        all_rows.x, all_rows.y, batch_size=8, initial_epoch=2, epochs=4, verbose=0
    )
    return {**first, "second": second.history, "epochs": second.epoch}


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


def towers(name: str, size: str = "mse", **kwargs: Any) -> Case:
    """Two named inputs, two named outputs; `size` is the loss of the second."""
    return Case(
        name,
        model=models.two_towers,
        data=data.named,
        loss=lambda: {"kind": "sparse_categorical_crossentropy", "size": size},
        **kwargs,
    )


def validation(rows: Data) -> Data:
    return take(rows, slice(0, 11))


# --- The cases ----------------------------------------------------------------

DATA = [
    Case("arrays"),
    Case("tensors", feed=data.tensors),
    Case("pandas", feed=data.pandas_frames, sample_weight=True),
    Case("tf_data", feed=data.tf_data, sample_weight=True),
    Case("data_loader", feed=data.loader, sample_weight=True),
    Case("py_dataset", feed=data.py_dataset, sample_weight=True),
    Case("py_dataset_2_workers", feed=data.py_dataset_2_workers, epochs=1),
    Case("generator", feed=data.generator, epochs=1, sample_weight=True),
    Case("generator_endless", feed=data.endless),
    towers("dict_inputs", metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]}),
    towers("dict_inputs_tf_data", feed=data.tf_data),
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
    ),
]

SIZES = [
    Case("size_23", rows=23, sample_weight=True),
    Case("size_25", rows=25, sample_weight=True),
    Case("size_1", rows=1),
    Case("size_7", rows=7),
    Case("size_16", rows=16),
    Case("size_3_bn", rows=3, model=models.dense_bn),
    Case("size_25_bn", rows=25, model=models.dense_bn),
    Case("batch_1", rows=5, batch=1),
    Case("batch_1_bn", rows=3, batch=1, model=models.dense_bn),
    Case("size_25_data_loader", rows=25, feed=data.loader),
    Case("size_25_tf_data", rows=25, feed=data.tf_data),
    Case("size_1_generator", rows=1, feed=data.generator, epochs=1),
]

LOSSES = [
    regression(
        f"loss_{reduction}",
        loss=lambda reduction=reduction: losses.MeanSquaredError(reduction=reduction),
        optimizer=lambda: optimizers.SGD(0.01),
        sample_weight=True,
    )
    for reduction in ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")
] + [
    Case(
        "loss_categorical_smoothed",
        data=data.one_hot,
        loss=lambda: losses.CategoricalCrossentropy(label_smoothing=0.1),
    ),
    Case(
        "loss_focal",
        model=models.logistic,
        data=data.binary,
        loss=lambda: losses.BinaryFocalCrossentropy(apply_class_balancing=True),
    ),
    regression("loss_huber", loss=lambda: "huber"),
    regression("loss_cosine", loss=lambda: "cosine_similarity"),
    regression("loss_function_per_sample", loss=lambda: per_sample, sample_weight=True),
    regression("loss_function_scalar", loss=lambda: scalar_of_batch),
    regression("loss_contrastive", loss=lambda: contrastive),
    towers(
        "loss_weights", "huber", compile={"loss_weights": {"kind": 0.3, "size": 2.0}}
    ),
    Case("regularizers", model=models.regularized, rows=23),
    Case("activity_regularizer", model=models.activity_regularized, rows=23),
    Case("add_loss_mean", model=lambda: models.adds_loss("mean"), rows=23),
    Case("add_loss_sum", model=lambda: models.adds_loss("sum"), rows=23),
    Case(
        "add_loss_mean_sum_penalty",
        model=models.adds_two_losses,
        rows=25,
        sample_weight=True,
    ),
]

METRICS = [
    Case(
        "accuracy",
        metrics=lambda: ["accuracy"],
        weighted_metrics=lambda: ["accuracy"],
        sample_weight=True,
    ),
    binary("auc", metrics.AUC, rows=23),
    binary("precision_recall", metrics.Precision, metrics.Recall),
    binary(
        "binary_counts",
        metrics.TruePositives,
        metrics.FalseNegatives,
        lambda: metrics.PrecisionAtRecall(0.5),
    ),
    Case(
        "f1_score",
        data=data.one_hot,
        loss=lambda: "categorical_crossentropy",
        metrics=lambda: [metrics.F1Score(average="macro")],
    ),
    Case("mean_iou", metrics=lambda: [metrics.MeanIoU(3, sparse_y_pred=False)]),
    regression(
        "r2_rmse",
        metrics=lambda: [metrics.R2Score(), metrics.RootMeanSquaredError()],
        rows=25,
    ),
    regression(
        "weighted_metrics",
        weighted_metrics=lambda: ["mae", metrics.RootMeanSquaredError()],
        sample_weight=True,
    ),
    regression("metric_maximum", metrics=lambda: [Largest()]),
    regression("metric_function", metrics=lambda: [largest_error, "mae"]),
    towers(
        "metrics_per_output",
        metrics=lambda: {"kind": "accuracy", "size": [metrics.R2Score(), "mae"]},
    ),
]

MODELS = [
    Case("sequential_unbuilt", model=models.unbuilt),
    Case("dense_bn_weights", model=models.dense_bn, sample_weight=True),
    Case("shared_layer", model=models.shared_layer),
    Case("subclassed_tf_data", model=models.Subclassed, feed=data.tf_data),
    Case("lstm_mask", model=models.lstm, data=data.tokens),
    Case(
        "gru_mask_in_loss",
        model=models.gru_tagger,
        data=data.tagged,
        metrics=lambda: ["accuracy"],
        rows=23,
    ),
    Case(
        "gru_mask_in_loss_weighted",
        model=models.gru_tagger,
        data=data.tagged,
        sample_weight=True,
        weighted_metrics=lambda: ["accuracy"],
    ),
    Case("masked_bn", model=models.masked_bn, data=data.tokens),
    Case("transformer", model=models.transformer, data=data.tokens),
    Case("counting_layer", model=models.counting),
    Case("spectral_normalization", model=models.spectral, rows=23),
    Case("tied_embeddings", model=models.tied, data=data.tagged),
    Case("position_embedding", model=models.with_positions, data=data.tagged),
    regression("custom_step", model=custom_steps.CustomLoss, loss=lambda: None),
    regression(
        "custom_step_submodels",
        model=custom_steps.AutoEncoder,
        loss=lambda: None,
        rows=23,
    ),
    regression("custom_predict_step", model=custom_steps.SpreadOfTheBatch),
]

# By the arguments of SGD; the learning rate comes first.
SGD: dict[str, dict[str, Any]] = {
    "sgd_plain": {},
    "weight_decay": {"weight_decay": 0.05},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
}
OPTIMIZERS = [
    *(
        with_optimizer(name, lambda options=options: optimizers.SGD(0.1, **options))
        for name, options in SGD.items()
    ),
    with_optimizer("adam", lambda: optimizers.Adam(0.01), tolerance=ADAM_TOLERANCE),
    with_optimizer(
        "adamw",
        lambda: optimizers.AdamW(0.01, weight_decay=0.1),
        tolerance=ADAM_TOLERANCE,
    ),
    with_optimizer("rmsprop", lambda: optimizers.RMSprop(0.01)),
    with_optimizer(
        "ema",
        lambda: optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
        ),
        script=fit_then_state,
    ),
    with_optimizer(
        "ema_at_end", lambda: optimizers.SGD(0.1, use_ema=True), script=fit_then_state
    ),
    with_optimizer(
        "gradient_accumulation",
        lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        rows=25,
    ),
    with_optimizer(
        "learning_rate_schedule",
        lambda: optimizers.SGD(
            optimizers.schedules.ExponentialDecay(0.2, 2, 0.5, staircase=True)
        ),
    ),
    with_optimizer(
        "loss_scale",
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.1), initial_scale=2.0**10, dynamic_growth_steps=2
        ),
    ),
    # Sums in half precision depend on their order: 11 and 8 bits of mantissa.
    with_optimizer(
        "mixed_float16",
        lambda: optimizers.SGD(0.1),
        policy="mixed_float16",
        tolerance=2**-8,
    ),
]

FIT_OPTIONS = [
    # One shape only: a compiler of C++ needs long for each on Torch.
    Case(
        "jit_compile_whole",
        rows=16,
        compile={"jit_compile": True},
        compile_alone={"jit_compile": False} if TORCH else {},
    ),
    Case("sample_weight", sample_weight=True, rows=23),
    Case("class_weight", fit=lambda rows: {"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}}),
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
    ),
    Case(
        "validation_weights",
        sample_weight=True,
        fit=lambda rows: {
            "validation_data": tuple(vars(validation(rows)).values()),
            "validation_freq": 2,
        },
    ),
    Case("shuffle", fit=lambda rows: {"shuffle": True}),
    Case(
        "steps_per_execution",
        rows=39,
        scores_by_batch=True,
        metrics=lambda: ["accuracy"],
        compile={"steps_per_execution": 3},
        # Keras refuses more than one step on Torch; what is logged is the same.
        compile_alone=ALONE,
    ),
    Case("on_batch_bn", script=on_batches, model=models.dense_bn),
    Case("initial_epoch", script=fit_twice),
]

# How rows are cut into batches, and what does not depend on it.
BATCHES = [replace(case, scores_by_batch=True) for case in (*DATA, *SIZES)]
CASES = [
    replace(case, nightly=True, module="exactness.single_cases")
    for case in (*BATCHES, *LOSSES, *METRICS, *MODELS, *OPTIMIZERS, *FIT_OPTIONS)
]
