"""TensorFlow: proofs for programs for any number of rows."""

from __future__ import annotations

import keras
import pytest

from row_proofs.cases import CASES
from row_proofs.proofs import built, proof_of
from row_proofs.row_case import RowCase

pytestmark = pytest.mark.one_backend

#: One of each kind of rules; the whole table takes a minute.
NAMES = (
    "dense 3-D",
    "layer norm",
    "embedding",
    "conv2d dilated",
    "causal attention",
    "LSTM",
    "take along axis",
    "reshaped there and back",
    "x * rows / rows",
    "repeated rows",
    "cumsum along rows",
    "first row added",
    "capacity",
    "row numbers",
    "table up to the batch",
    "x / rows",
    "x / at most 64 rows",
    "as many columns as rows",
    "sum / rows",
    "sum + 1",
    "masked mean",
    "KL divergence",
    "moving average of a mean",
    "running max",
    "gradient clipped by its norm",
    "loop over time",
    "loop over rows",
    "branch on a statistic",
)


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in NAMES], ids=lambda case: case.name
)
def test_placements_for_any_number_of_rows(case: RowCase) -> None:
    layer, values = built(case)
    proof = proof_of(layer, values, [a.has_rows for a in case.arguments], sizes=())
    assert (proof.problem is not None) == case.problem
    if not case.problem:
        assert tuple(proof.outputs) == case.outputs
        assert tuple(proof.losses) == case.losses
