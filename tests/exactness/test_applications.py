"""Networks that nobody here wrote train under a strategy as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from exactness.keras_hub_cases import CASES
from harness.data import Data
from harness.strategies import STRATEGIES
from harness.training import assert_same_training

# Behind some hundred layers, with a batch normalization after each convolution and a
# few values to normalize over, the last bits of float32 grow until nothing else is
# left: one device differs from itself by 100 % when an input changes by 1e-7. With this
# much added to the variances the same change makes 1e-6 of what is learned, and 1e-4
# where a ReLU falls on its other side. A forgotten row makes more than a tenth.
EPSILONS = {
    "MobileNet": 0.1,
    "MobileNetV2": 0.1,
    "ResNet50V2": 1.0,
    "EfficientNetB0": 0.3,
}
TOLERANCE = 1e-3


def pictures(rows: int) -> Data:
    rng = np.random.default_rng(5)
    x = rng.uniform(-1, 1, size=(rows, 32, 32, 3)).astype("float32")
    return Data(x, rng.integers(0, 4, rows))


def first_blocks_of_mobilenet() -> keras.Model:
    """Three of thirteen: of the same layers, and soon compiled."""
    network = keras.applications.MobileNet(
        weights=None, input_shape=(32, 32, 3), include_top=False, alpha=0.25
    )
    x = network.get_layer("conv_pw_3_relu").output
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(network.input, keras.layers.Dense(4, "softmax")(x))


def application(name: str) -> keras.Model:
    keras.utils.set_random_seed(7)
    if name == "MobileNet":
        model = first_blocks_of_mobilenet()
    else:
        network = getattr(keras.applications, name)
        model = network(weights=None, input_shape=(32, 32, 3), classes=4)
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # Replicas are to draw different masks.
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.epsilon = EPSILONS[name]
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def learned(model: keras.Model) -> tuple[float, np.ndarray]:
    """The loss of two steps, and by how much they change the weights."""

    def weights() -> np.ndarray:
        values = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
        return np.concatenate([value.reshape(-1) for value in values])

    data = pictures(8)
    before = weights()
    history = model.fit(data.x, data.y, batch_size=4, shuffle=False, verbose=0)
    return history.history["loss"][0], weights() - before


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["MobileNet"])
@pytest.mark.parametrize("name", EPSILONS)
def test_application(name: str, mirrored: Any) -> None:
    loss, expected = learned(application(name))
    with mirrored.scope():
        model = application(name)
    mirrored_loss, found = learned(model)
    assert mirrored_loss == pytest.approx(loss, rel=1e-5)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy_name", [name for name in STRATEGIES if name.startswith("mirrored_2")]
)
def test_transformer_of_keras_hub(strategy_name: str) -> None:
    pytest.importorskip("keras_hub", reason="keras_hub is not installed")
    [case] = CASES
    assert_same_training(case, STRATEGIES[strategy_name].make())
