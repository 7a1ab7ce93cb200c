"""What is trained under `ModelParallelStrategy`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from exactness.cases import TORCH, fit_only
from harness import data, models
from harness.case import ADAM_TOLERANCE, Case
from keras import optimizers

# One program, of batches that no mesh divides.
ODD: dict[str, Any] = {"rows": 14, "batch": 7, "script": fit_only}

_CASES = [
    Case("dense_weights_23", rows=23, sample_weight=True, metrics=lambda: ["accuracy"]),
    Case("conv_bn_25", models.conv, data.images, rows=25, script=fit_only),
    Case("dense_bn_3", models.dense_bn, rows=3, script=fit_only),
    Case(
        "transformer_adam",
        *(models.transformer, data.tokens),
        **ODD,
        optimizer=lambda: optimizers.Adam(0.01),
        tolerance=ADAM_TOLERANCE,
    ),
    Case(
        "embedding_adagrad",
        *(models.gru_tagger, data.tagged),
        **ODD,
        metrics=lambda: ["accuracy"],
        optimizer=lambda: optimizers.Adagrad(0.1),
    ),
    Case(
        "global_clipnorm_ema",
        # Nothing after `fit`: Keras 3.15 lets weights and averages share memory.
        **ODD,
        optimizer=lambda: optimizers.SGD(
            0.1, momentum=0.9, global_clipnorm=0.1, use_ema=True
        ),
    ),
    Case(
        "accumulation",
        **ODD,
        optimizer=lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    ),
    Case(
        "mixed_bfloat16",
        **ODD,
        policy="mixed_bfloat16",
        optimizer=lambda: optimizers.SGD(0.1),
        # Eight bits of mantissa, and gradients near zero that are added in parts.
        tolerance=2**-5,
    ),
    Case(
        "steps_per_execution",
        rows=39,
        compile={"steps_per_execution": 3},
        compile_alone={"steps_per_execution": 1} if TORCH else {},
        metrics=lambda: ["accuracy"],
    ),
    # Each operation is compiled, for each shape: few of them by day.
    Case(
        "eager",
        *(models.linear, data.regression),
        **{"rows": 8, "epochs": 1, "script": fit_only},
        loss=lambda: "mse",
        compile={"run_eagerly": True},
    ),
]

CASES = [replace(case, module="model_parallel.model_parallel_cases") for case in _CASES]
