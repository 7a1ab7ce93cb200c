"""Rules, by kind of operation of Keras: where its results have the rows."""

from __future__ import annotations

from keras_strategies.rows.rules import (  # noqa: F401  They register them.
    batches,
    control_flow,
    declared,
    elementwise,
    indexing,
    products,
    reductions,
    shapes,
)
