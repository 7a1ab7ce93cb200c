"""Models of keras_rs: tables on servers, ids as rows, losses and metrics."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytest.importorskip("keras_rs", reason="keras_rs is not installed")

from harness.keras_rs_models import BATCH, clicks, dlrm, ranking_data, ranking_model

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


MODELS = {
    "ranking": (lambda: ranking_model(keras.optimizers.Adagrad(0.1)), ranking_data, 2),
    "dlrm": (dlrm, clicks, 3),
}


def trained(model, x, y):
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model, history.history


def tables() -> tuple[list[str], list[str]]:
    """Paths of variables of the worker's last program: tables, and pulled in full."""
    from keras_strategies.runtime import context

    programs = context.current_strategy()._worker.programs._programs
    kept = [own for own in programs.values() if own]
    variables = list(kept[-1].values())[-1][0].variables
    return [v.path for v in variables.tables], [v.path for v in variables.others]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_keras_rs_trains_as_on_one_device(synchronous, name) -> None:
    make, data, count = MODELS[name]
    x, y = data()
    alone, expected = trained(make(), x, y)
    with synchronous.scope():
        model, found = trained(make(), x, y)
    # Only the rows of a batch are pulled.
    coordinator = ks.ClusterCoordinator(synchronous)
    rows, full = coordinator.schedule(tables).fetch(clusters.SECONDS)
    assert sum("embeddings" in path for path in rows) == count
    assert not any("embeddings" in path for path in full)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    for ours, theirs in zip(
        clusters.values(model.variables), clusters.values(alone.variables), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(
        predicted, alone.predict(x, batch_size=BATCH, verbose=0), rtol=1e-4, atol=1e-5
    )
