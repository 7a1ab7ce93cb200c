"""Input that can be read once: training sees all of its batches."""

from __future__ import annotations

import numpy as np
import pytest
from harness import streams
from harness.strategies import STRATEGIES

pytestmark = pytest.mark.one_backend

KINDS = [*streams.STREAMS, "distributed", "distributed_loader", "distributed_function"]


@pytest.fixture(scope="module", params=["mirrored_2", "one_device"])
def strategy(request):
    return STRATEGIES[request.param].make()


def made(strategy, kind: str):
    """Input of a kind; distributed datasets are asked for their specification."""
    if kind in streams.STREAMS:
        return streams.STREAMS[kind]()
    if kind == "distributed_function":
        return strategy.distribute_datasets_from_function(
            lambda context: streams.STREAMS["loader"]()
        )
    source = "loader" if kind == "distributed_loader" else "generator"
    dataset = strategy.experimental_distribute_dataset(streams.STREAMS[source]())
    assert dataset.element_spec is not None
    return dataset


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["mirrored_2-*", "one_device-loader"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_is_seen_once(strategy, kind) -> None:
    with strategy.scope():
        trained = streams.model(4, is_built=False)
    history = trained.fit(made(strategy, kind), shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [streams.LOSS], rtol=1e-5)
    # A dataset function yields a batch for each replica.
    count = strategy.num_replicas_in_sync if kind == "distributed_function" else 1
    assert streams.steps(trained) == 6 // count


@pytest.mark.nightly(unless=["mirrored_2-generator", "mirrored_2-loader"])
@pytest.mark.parametrize("kind", ["generator", "tf_data", "loader"])
def test_evaluation_and_validation_see_every_batch(strategy, kind) -> None:
    x, y = streams.BATCHES[1]
    with strategy.scope():
        evaluated, trained = streams.model(3), streams.model(3)
    loss = evaluated.evaluate(made(strategy, kind), verbose=0)
    np.testing.assert_allclose(loss, streams.LOSS, rtol=1e-5)
    validation = made(strategy, kind)
    history = trained.fit(x, y, validation_data=validation, verbose=0).history
    np.testing.assert_allclose(history["val_loss"], [streams.LOSS], rtol=1e-5)
