"""What is trained under `ModelParallelStrategy`."""

from __future__ import annotations

from dataclasses import replace

from keras import optimizers

from harness import data, models
from harness.case import ADAM_TOLERANCE, Case

_CASES = [
    Case("dense_weights_23", rows=23, sample_weight=True, metrics=lambda: ["accuracy"]),
    Case("size_3", rows=3),
    Case("conv_bn_25", model=models.conv, data=data.images, rows=25),
    Case("dense_bn_3", model=models.dense_bn, rows=3),
    Case(
        "transformer_adam",
        model=models.transformer,
        data=data.tokens,
        rows=23,
        optimizer=lambda: optimizers.Adam(0.01),
        tolerance=ADAM_TOLERANCE,
    ),
    Case("embedding_lstm_mask", model=models.lstm, data=data.tokens, rows=25),
    Case(
        "embedding_adagrad",
        model=models.gru_tagger,
        data=data.tagged,
        metrics=lambda: ["accuracy"],
        optimizer=lambda: optimizers.Adagrad(0.1),
        rows=23,
    ),
    Case(
        "global_clipnorm_ema",
        optimizer=lambda: optimizers.SGD(
            0.1, momentum=0.9, global_clipnorm=0.1, use_ema=True
        ),
        # Nothing after `fit`: Keras 3.15 lets weights and averages share memory.
        script=lambda case, model, all_rows: {
            "history": model.fit(
                all_rows.x, all_rows.y, batch_size=8, epochs=2, verbose=0, shuffle=False
            ).history
        },
    ),
    Case(
        "accumulation",
        rows=25,
        optimizer=lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    ),
    Case(
        "mixed_bfloat16",
        policy="mixed_bfloat16",
        optimizer=lambda: optimizers.SGD(0.1),
        # Eight bits of mantissa, and gradients near zero that are added in parts.
        tolerance=2**-5,
    ),
    Case(
        "steps_per_execution",
        rows=39,
        compile={"steps_per_execution": 3},
        metrics=lambda: ["accuracy"],
    ),
    Case("regularized_eager", model=models.regularized, compile={"run_eagerly": True}),
]

CASES = [replace(case, module="harness.model_parallel_cases") for case in _CASES]
