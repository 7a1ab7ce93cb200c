"""Models of keras-hub with sharded variables, on Torch: no layout is given."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import pytest
from harness.case import Results, as_arrays, state_of
from harness.training import assert_same

import keras_strategies as ks

pytest.importorskip("keras_hub", reason="keras_hub is not installed")
if keras.backend.backend() != "torch":
    pytest.skip("on JAX, Keras's compiler shards", allow_module_level=True)

from field.compare import FieldCase
from field.models import CASES, DIFFUSION

LAYOUTS = {"fsdp": 1, "auto": 2}
#: What each reaches: a sum without a redistribution, a view that local parts refuse.
BY_DAY = (("deberta", "fsdp"), ("gemma", "auto"))


def fit(case: FieldCase, scope: Any) -> Results:
    keras.utils.set_random_seed(7)
    with scope:
        model = case.build()
    keras.utils.set_random_seed(8)
    given = case.feed(case.data(case.rows), case.batch)
    history = model.fit(**given, epochs=case.epochs, shuffle=False, verbose=0)
    return as_arrays({"history": history.history, **state_of(model)})


def _parameters() -> Any:
    for case in [*CASES, *DIFFUSION]:
        for layout in LAYOUTS:
            marks = [] if (case.name, layout) in BY_DAY else [pytest.mark.nightly]
            name = f"{case.name}-{layout}"
            yield pytest.param(case, layout, "two", marks=marks, id=name)


@pytest.mark.nightly(unless=["gemma-auto"])
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize(
    ("case", "layout", "cluster"),
    list(_parameters()),
    indirect=["cluster"],
    scope="session",
)
def test_a_backbone_equals_one_device(cluster, case: FieldCase, layout: str) -> None:
    name, width = case.name, LAYOUTS[layout]

    def program(strategy: Any) -> Results:
        [own] = [each for each in [*CASES, *DIFFUSION] if each.name == name]
        parts = ks.ModelParallelStrategy(layout, ["cpu:0"], width, min_shard_bytes=0)
        return fit(own, parts.scope())

    expected = fit(case, contextlib.nullcontext())
    for found in cluster(program):
        assert_same(expected, found, max(case.tolerance, 1e-4), name)
