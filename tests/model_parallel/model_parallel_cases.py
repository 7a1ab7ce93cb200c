"""What is trained under `ModelParallelStrategy`."""

from __future__ import annotations

from dataclasses import replace

from exactness.cases import TORCH, fit_only
from harness import data, models
from harness.case import ADAM_TOLERANCE, Case
from keras import optimizers

# One program, of batches that no mesh divides.
ODD: dict[str, int] = {"rows": 14, "batch": 7}

_CASES = [
    Case(
        "dense_weights_23",
        rows=23,
        sample_weight=True,
        metrics=lambda: ["accuracy"],
    ),
    Case(
        "conv_bn_25",
        model=models.conv,
        data=data.images,
        rows=25,
        script=fit_only,
    ),
    Case("dense_bn_3", model=models.dense_bn, rows=3, script=fit_only),
    Case(
        "transformer_adam",
        model=models.transformer,
        data=data.tokens,
        **ODD,
        optimizer=lambda: optimizers.Adam(0.01),
        tolerance=ADAM_TOLERANCE,
        script=fit_only,
    ),
    Case(
        "embedding_adagrad",
        model=models.gru_tagger,
        data=data.tagged,
        metrics=lambda: ["accuracy"],
        optimizer=lambda: optimizers.Adagrad(0.1),
        **ODD,
        script=fit_only,
    ),
    Case(
        "global_clipnorm_ema",
        **ODD,
        optimizer=lambda: optimizers.SGD(
            0.1, momentum=0.9, global_clipnorm=0.1, use_ema=True
        ),
        # Nothing after `fit`: Keras 3.15 lets weights and averages share memory.
        script=fit_only,
    ),
    Case(
        "accumulation",
        **ODD,
        optimizer=lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
        script=fit_only,
    ),
    Case(
        "mixed_bfloat16",
        **ODD,
        policy="mixed_bfloat16",
        optimizer=lambda: optimizers.SGD(0.1),
        # Eight bits of mantissa, and gradients near zero that are added in parts.
        tolerance=2**-5,
        script=fit_only,
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
        rows=8,
        epochs=1,
        model=models.linear,
        loss=lambda: "mse",
        data=data.regression,
        compile={"run_eagerly": True},
        script=fit_only,
    ),
]

CASES = [replace(case, module="model_parallel.model_parallel_cases") for case in _CASES]
