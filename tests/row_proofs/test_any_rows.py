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
    "conv2d dilated",
    "masked LSTM",
    "x * rows / rows",
    "repeated rows",
    "cumsum along rows",
    "capacity",
    "x / rows",
    "x / at most 64 rows",
    "sum / rows",
    "moving average of a mean",
    "loop over time",
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
