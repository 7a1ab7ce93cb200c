"""Each layer call of the table: placements of its results, or that it is not split."""

from __future__ import annotations

import keras
import pytest

from row_proofs.cases import CASES, RowCase
from row_proofs.proofs import needs_prover, placed_updates, proof_of_case

BACKEND = keras.backend.backend()


@needs_prover
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.only in ("", BACKEND)],
    ids=lambda case: case.name,
)
def test_placements(case: RowCase) -> None:
    layer, proof = proof_of_case(case)
    if case.problem:
        assert proof.problem is not None
        return
    assert proof.problem is None
    assert tuple(proof.outputs) == case.outputs
    assert tuple(proof.losses) == case.losses
    assert tuple(placed_updates(layer, proof)) == case.updates
    assert proof.draws == case.draws


def test_table_is_complete() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 120
