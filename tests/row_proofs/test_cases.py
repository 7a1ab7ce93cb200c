"""Each layer call of the table: placements of its results, or that it is not split.

Where it is proved, two uneven parts of a later batch give the numbers of the batch.
"""

from __future__ import annotations

import numpy as np
import pytest

from row_proofs import proofs
from row_proofs.cases import CASES
from row_proofs.row_case import BATCH
from row_proofs.split_numbers import assert_parts_equal

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

#: Parts of these need the statistics of all replicas.
COLLECTIVES = ("batch norm of images", "batch norm and a loss", "layer with statistics")
AT_NIGHT = "transformer of two blocks with dropout"
#: Those of a program for any number of rows, one of each kind of rules.
ANY_ROWS = (
    *("conv2d dilated", "masked LSTM", "x * rows / rows", "repeated rows"),
    *("cumsum along rows", "capacity", "x / rows", "x / <= 64 rows"),
    *("sum / rows", "moving average of a mean", "loop over time"),
)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.slow(seconds=6)
@proofs.needs_split
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n == AT_NIGHT)) for n in CASES],
)
def test_placements(name: str) -> None:
    case = CASES[name]
    layer, values = proofs.built(case)
    proof = proofs.proof_of(layer, values, case.has_rows)
    if case.problem:
        assert proof.problem is not None
        return
    assert proof.problem is None
    assert tuple(proof.outputs) == case.outputs
    assert tuple(proof.losses) == case.losses
    assert tuple(proofs.placed_updates(layer, proof)) == case.updates
    assert tuple(proof.draws) == case.draws
    if any(case.draws) or name in COLLECTIVES:
        return
    random = np.random.default_rng(23)
    later = [argument.value(BATCH, random) for argument in case.arguments]
    assert_parts_equal(layer, later, proof, case.has_rows)


@pytest.mark.one_backend("tensorflow")
@proofs.of_tensorflow
@pytest.mark.parametrize("name", ANY_ROWS)
def test_placements_for_any_number_of_rows(name: str) -> None:
    case = CASES[name]
    layer, values = proofs.built(case)
    proof = proofs.proof_of(layer, values, case.has_rows, sizes=())
    assert (proof.problem is not None) == case.problem
    if not case.problem:
        assert tuple(proof.outputs) == case.outputs
        assert tuple(proof.losses) == case.losses
