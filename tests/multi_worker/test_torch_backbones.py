"""Models of keras-hub with sharded variables, on Torch: no layout is given."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from harness.case import Results, as_arrays, state_of
from harness.training import assert_workers
from multi_worker.clusters import model_parallel, scope_of, with_clusters

pytest.importorskip("keras_hub", reason="keras_hub is not installed")
if keras.backend.backend() != "torch":
    pytest.skip("on JAX, Keras's compiler shards", allow_module_level=True)

from field.compare import FieldCase
from field.models import CASES, DIFFUSION

LAYOUTS = {"fsdp": 1, "auto": 2}
#: What each reaches: a sum without a redistribution, a view that local parts refuse.
BY_DAY = (("deberta", "fsdp"), ("gemma", "auto"))


def fit(case: FieldCase, strategy: Any) -> Results:
    keras.utils.set_random_seed(7)
    with scope_of(strategy):
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
@with_clusters("case layout cluster", list(_parameters()))
def test_a_backbone_equals_one_device(cluster, case: FieldCase, layout: str) -> None:
    name, width = case.name, LAYOUTS[layout]

    def program(strategy: Any) -> Results:
        [own] = [each for each in [*CASES, *DIFFUSION] if each.name == name]
        return fit(own, model_parallel(layout, width))

    assert_workers(fit(case, None), cluster(program), max(case.tolerance, 1e-4))
