"""Each layer call of the table: placements of its results, or that it is not split.

Where it is proved, two uneven parts of a later batch give the numbers of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from row_proofs.cases import CASES
from row_proofs.proofs import built, needs_split, placed_updates, proof_of
from row_proofs.row_case import BATCH, RowCase
from row_proofs.split_numbers import assert_parts_equal

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

BACKEND = keras.backend.backend()
#: Parts of these need the statistics of all replicas.
WITH_COLLECTIVES = ("batch norm of images", "batch norm and a loss")
#: Slow ones.
AT_NIGHT = ("transformer of two blocks with dropout",)


def parameters() -> Iterator[Any]:
    for case in CASES:
        marks = [pytest.mark.nightly] if case.name in AT_NIGHT else []
        yield pytest.param(case, id=case.name, marks=marks)


#: Those of a program for any number of rows, one of each kind of rules.
ANY_ROWS = (
    *("conv2d dilated", "masked LSTM", "x * rows / rows", "repeated rows"),
    *("cumsum along rows", "capacity", "x / rows", "x / at most 64 rows"),
    *("sum / rows", "moving average of a mean", "loop over time"),
)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.slow(seconds=6)
@needs_split
@pytest.mark.parametrize("case", parameters())
def test_placements(case: RowCase) -> None:
    layer, values = built(case)
    has_rows = [argument.has_rows for argument in case.arguments]
    proof = proof_of(layer, values, has_rows)
    if case.problem:
        assert proof.problem is not None
        return
    assert proof.problem is None
    assert tuple(proof.outputs) == case.outputs
    assert tuple(proof.losses) == case.losses
    assert tuple(placed_updates(layer, proof)) == case.updates
    assert any(proof.draws) == case.draws
    if case.draws or case.name in WITH_COLLECTIVES:
        return
    random = np.random.default_rng(23)
    later = [argument.value(BATCH, random) for argument in case.arguments]
    assert_parts_equal(layer, later, proof, has_rows)


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="programs of TensorFlow")
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ANY_ROWS], ids=lambda case: case.name
)
def test_placements_for_any_number_of_rows(case: RowCase) -> None:
    layer, values = built(case)
    proof = proof_of(layer, values, [a.has_rows for a in case.arguments], sizes=())
    assert (proof.problem is not None) == case.problem
    if not case.problem:
        assert tuple(proof.outputs) == case.outputs
        assert tuple(proof.losses) == case.losses
