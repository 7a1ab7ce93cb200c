"""Trainings that hide how a call depends on the batch.

A term is zero in the first epoch, a capacity is not reached, a table has as many rows
as the last batch; a step reads tensors of a call from elsewhere than from its outputs;
hooks of Torch's modules see the rows. Calls that cannot be split by rows say so.
"""

from __future__ import annotations

import contextvars
import functools
import os
import random
import threading
import types
import warnings
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import Case
from harness.training import compiled as of_case
from keras import layers, ops

from keras_strategies.keras_compat.backends import keras_on_tensorflow
from row_proofs import proofs
from row_proofs.proofs import COUNT, STATE, Apply, Function, Make, Own, OwnModel

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

X, Y = proofs.normal(44, 4), proofs.normal(44, 1, seed=8)
#: 10 rows, as many as the last of three batches of 17.
TABLE = proofs.normal(10, 4, seed=9)
BATCH = 17
X[BATCH:] *= 4  # Later batches have larger values.


def model_of(*parts: Any) -> keras.Model:
    return proofs.sequential(*parts, columns=4)


def around(function: Function, **weights: Any) -> keras.Model:
    return model_of(Own(function, kernel=(4, 4), **weights), layers.Dense(1))


def annealed_sum(layer: Own, x: Any) -> Any:
    hidden = ops.matmul(x, layer.kernel)
    layer.add_loss(layer.beta * 1e-2 * ops.sum(ops.square(hidden)))
    return hidden


def zero_times_mean(layer: Own, x: Any) -> Any:
    """The branch's scale is trained from zero."""
    hidden = ops.matmul(x, layer.kernel)
    return hidden + layer.scale * (hidden - ops.mean(hidden, axis=0))


def capacity(layer: Own, x: Any) -> Any:
    """Experts drop rows of large batches only."""
    chosen = ops.one_hot(ops.argmax(ops.matmul(x, layer.kernel), -1), 4)
    place = ops.cumsum(chosen, axis=0) * chosen
    return x * ops.cast(ops.sum(place, -1, keepdims=True) <= 5, "float32")


def events(layer: Own, x: Any) -> Any:
    found = ops.sum(ops.cast(x > 4.0, "int32"))
    layer.count.assign(layer.count + found)
    layer.total.assign(layer.total + ops.cast(found, "float32"))
    return ops.matmul(x, layer.kernel)


def loss_by_rows(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
    found, rows = y_pred
    return ops.sum(ops.square(found - y)) / (1 if rows is None else rows)


def loss_of_codes(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
    """The second output has no batch axis, and is as long as the part of a replica."""
    found, codes = y_pred
    near = ops.logsumexp(ops.matmul(found, ops.transpose(codes)), -1)
    return ops.mean(near) + ops.mean(ops.square(found - y))


def codebook() -> keras.Model:
    model = OwnModel(lambda own, x: (own.inner(x), own.codes * 1.0), loss_of_codes)
    model.codes = model.add_weight(shape=(9, 4), name="codes")
    return model


def contrast(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(y_pred, ops.transpose(y_pred)) - 1))


def views(x: Any) -> Any:
    """Two rows of output for each row, beside each other."""
    return ops.reshape(ops.stack([x, x * 0.9], 1), (-1, 4))


def attend(inputs: Any, table: Any) -> Any:
    near = ops.softmax(ops.matmul(inputs, ops.transpose(table)))
    return inputs + ops.matmul(near, table)


class Mode(layers.Layer):
    def call(self, first: Any = None, second: Any = None, mode: int = 0) -> Any:
        if first is None:
            return second - ops.max(second, 0)
        return first - ops.mean(first, 0) if mode else first


def of_prototypes(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
    """An argument without a batch axis, as long as the last batch."""
    near = model.attend(model.inner(x), ops.convert_to_tensor(TABLE))
    return ops.mean(ops.square(model.head(near) - y))


def of_modes(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
    """An int argument, and which argument is given."""
    hidden, mode = model.inner(x), model.mode
    found = mode(hidden, mode=0) + mode(hidden, mode=1)
    found += mode(hidden, None) + mode(None, hidden)
    return ops.mean(ops.square(model.head(found / 8) - y))


ZEROS = {"shape": (4,), "initializer": "zeros"}
MODELS: dict[str, Make] = {
    "AnnealedSum": lambda: around(annealed_sum, beta=STATE),
    "ZeroTimesMean": lambda: around(zero_times_mean, scale=ZEROS),
    "Capacity": lambda: around(capacity),
    "Events": lambda: around(events, total=STATE, count=COUNT),
    "PythonOutput": lambda: OwnModel(
        lambda model, x: (model.head(model.inner(x)), x.shape[0]), loss_by_rows
    ),
    "Codebook": codebook,
    "TwoViews": lambda: OwnModel(
        lambda model, x: model.inner(ops.concatenate([x, x * 0.9], 0)), contrast
    ),
    "Interleaved": lambda: OwnModel(lambda model, x: model.inner(views(x)), contrast),
    "Prototypes": lambda: OwnModel(None, of_prototypes, attend=Apply(attend)),
    "Modes": lambda: OwnModel(None, of_modes, mode=Mode()),
    "softmax": lambda: model_of(layers.Rescaling(30.0), layers.Dense(3, "softmax")),
    "sigmoid": lambda: model_of(layers.Rescaling(30.0), layers.Dense(1, "sigmoid")),
}
#: Losses, and numbers of classes.
LOSSES = {
    "softmax": ("sparse_categorical_crossentropy", 3),
    "sigmoid": ("binary_crossentropy", 2),
}
#: Computed by replicas, without a warning.
SPLIT = ["AnnealedSum", "ZeroTimesMean", "Events", "Codebook", "Interleaved", *LOSSES]
if proofs.BACKEND == "tensorflow":
    # A table is the same for all replicas.
    SPLIT.append("Prototypes")
    if not keras_on_tensorflow.step_is_traced_for_batches(steps_per_execution=1):
        # A program for any number of rows sees None as their number.
        SPLIT.append("PythonOutput")


# Three replicas differ from two by an uneven batch for each pair of them.
@pytest.mark.one_backend
@pytest.mark.parametrize("replicas", [3, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_one_device(name: str, replicas: int) -> None:
    loss, classes = LOSSES.get(name, ("mse", 0))
    targets = (np.abs(X[:, 0]) * 7).astype("int32") % classes if classes else Y

    def fit(model: keras.Model) -> Any:
        beta = [model.layers[0].beta] if name == "AnnealedSum" else []
        changes = keras.callbacks.LambdaCallback(
            lambda epoch, logs: [value.assign(float(epoch)) for value in beta]
        )
        return proofs.fits(X, targets, BATCH, epochs=3, callbacks=[changes])(model)

    make = proofs.compiled(MODELS[name], 0.004, loss)
    said = proofs.assert_exact(make, fit, replicas)
    assert proofs.BACKEND == "jax" or bool(said) == (name not in SPLIT), said


Outputs = make_dataclass("Outputs", ["last", "hidden"])


def kept(put: Any, get: Any, given: Any = lambda: None) -> keras.Model:
    """A model that keeps its hidden tensor, whose mean is a term of the step's loss.

    It returns what `put` makes of the last and the hidden tensor; `get` finds both in
    that, or in what is given to the call.
    """

    def call(model: Any, inputs: Any, *given: Any) -> Any:
        hidden = model.inner(inputs)
        last = model.head(hidden)
        found = put(last, hidden, *given)
        return last if found is None else found

    def loss(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
        own = given()
        last, hidden = get(model(x, given=own), own)
        means = ops.square(ops.mean(hidden, axis=0))
        return ops.mean(ops.square(y - last)) + ops.mean(means)

    return OwnModel(call, loss)


def loss_with_factor(model: Any, x: Any, y: Any, y_pred: Any) -> Any:
    """A tensor of the step is in an attribute in one call."""
    model.factor = ops.abs(y)
    outputs = model(x)
    model.factor = None
    return ops.mean(ops.square(y - outputs))


def with_factor(model: Any, x: Any) -> Any:
    hidden = model.inner(x)
    return model.head(hidden if model.factor is None else hidden * model.factor)


CONTEXT: Any = contextvars.ContextVar("CONTEXT")
LAYER = layers.Identity()
LEAVING: dict[str, Make] = {
    "context variable": lambda: kept(
        lambda _, h: CONTEXT.set(h) and None, lambda y, _: (y, CONTEXT.get())
    ),
    "other layer": lambda: kept(
        lambda _, h: setattr(LAYER, "hidden", h), lambda y, _: (y, LAYER.hidden)
    ),
    # No state that a proof knows of.
    "dataclass": lambda: kept(Outputs, lambda found, _: (found.last, found.hidden)),
    "function": lambda: kept(
        lambda y, h: {"y": y, "h": lambda: h}, lambda d, _: (d["y"], d["h"]())
    ),
    "object that is given": lambda: kept(
        lambda last, hidden, into=None: into and setattr(into, "hidden", hidden),
        lambda found, into: (found, into.hidden),
        lambda: types.SimpleNamespace(hidden=None),
    ),
    "function that is given": lambda: kept(
        lambda last, hidden, keep=None: keep and keep(hidden),
        lambda found, keep: (found, keep.__self__[0]),
        lambda: [].append,
    ),
    "in an attribute": lambda: OwnModel(with_factor, loss_with_factor, factor=None),
}


@pytest.mark.one_backend("torch")
@proofs.needs_split  # JAX lets no tensor leave a traced call.
@pytest.mark.parametrize("name", LEAVING)
def test_tensors_that_leave_a_call(name: str) -> None:
    make = proofs.compiled(LEAVING[name], 0.02)
    assert proofs.assert_exact(make, proofs.fits(X, Y, BATCH, epochs=2))


def centered(seen: list[int], module: Any, inputs: Any, outputs: Any) -> Any:
    seen.append(len(outputs))
    return outputs - outputs.mean(0)


def scaled(seen: list[int], module: Any, inputs: Any) -> Any:
    seen.append(len(inputs[0]))
    return tuple(x / (1 + x.abs().max()) for x in inputs)


def clipped(seen: list[int], module: Any, inputs: Any, outputs: Any) -> Any:
    seen.append(len(outputs[0]))
    norm = sum(part.square().sum() for part in inputs if part is not None)
    return tuple(None if part is None else part / (1 + norm) for part in inputs)


def noted(seen: list[int], module: Any, inputs: Any, outputs: Any) -> Any:
    """Sees all modules of the process."""
    if isinstance(module, layers.Dense) and ops.is_tensor(outputs):
        seen.append(len(outputs))


#: How each hook is registered: the layer, or None for all, and the method.
HOOKS = {
    centered: (0, "register_forward_hook"),
    scaled: (0, "register_forward_pre_hook"),
    clipped: (1, "register_full_backward_hook"),
    noted: (None, "register_module_forward_hook"),
}


@pytest.mark.one_backend("torch")
@pytest.mark.skipif(proofs.BACKEND != "torch", reason="hooks of Torch")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_modules_see_the_rows_of_all_replicas(hook: Any) -> None:
    import torch

    # What hooks have seen; the rows of all replicas, once.
    seen: list[list[int]] = []

    def fit(model: keras.Model) -> Any:
        seen.append([])
        layer, method = HOOKS[hook]
        of = torch.nn.modules.module if layer is None else model.layers[layer]
        handle = getattr(of, method)(functools.partial(hook, seen[-1]))
        try:
            return proofs.fits(X, Y, BATCH, epochs=3)(model)
        finally:
            handle.remove()

    make = proofs.compiled(lambda: model_of(layers.Dense(4), layers.Dense(1)), 0.004)
    said = proofs.assert_exact(make, fit)
    assert seen[0] == seen[1] and len(seen[0]) >= 9
    assert hook is noted or any("hooks" in text for text in said)


SIX = proofs.shifted(25, np.linspace(0.3, 2, 25, dtype="float32")[:, None])
SINE = np.sin(SIX[:, :1])
CLASSES = np.random.default_rng(3).integers(0, 3, 12)


def mirrored_model(*inner: Any) -> keras.Model:
    with proofs.mirrored().scope():
        # Programs of TensorFlow take longer to trace than a few steps to run.
        model = proofs.sequential(*inner)
        model.compile("sgd", "mse", run_eagerly=True)
    return model


class CallCount(layers.Layer):
    calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return 2 * inputs


@proofs.needs_split
def test_python_runs_as_often_as_on_one_device() -> None:
    layer = CallCount()
    model = mirrored_model(layer)
    layer.calls = 0
    text = "split by rows.*'calls'|'calls'.*split by rows"
    with pytest.warns(UserWarning, match=text):
        model.predict_on_batch(SIX[:8])
    assert layer.calls == 1


_AT_NIGHT = [pytest.mark.nightly] * (proofs.BACKEND != "torch")
POLICIES = [pytest.param(p, marks=_AT_NIGHT) for p in ("float32", "mixed_float16")]


# Parts differ most in bfloat16. With mixed_float16 replicas keep statistics of their
# own. Outside of the nightly run Torch, where it takes little, has all.
@pytest.mark.nightly(unless=["mixed_float16"])
@pytest.mark.filterwarnings("error:.*split by rows")
@proofs.needs_split
@pytest.mark.parametrize("policy", ["mixed_bfloat16", *POLICIES])
def test_layers_of_keras_are_split(policy: str) -> None:
    words = np.random.default_rng(3).integers(0, 11, (8, 3)).astype("int32")

    def make() -> keras.Model:
        parts = layers.LSTM(4, return_sequences=True), layers.BatchNormalization()
        noise = layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.2)
        # Keras on TensorFlow cannot add a loss in 16 bits to one in 32.
        adds = proofs.BACKEND == "torch" or policy == "float32"
        dense = layers.Dense(3, activity_regularizer="l2" if adds else None)
        last = layers.GlobalAveragePooling1D(), dense, layers.Softmax(dtype="float32")
        embedding = layers.Embedding(11, 8, mask_zero=True)
        first = keras.Input((3,), dtype="int32"), embedding
        return keras.Sequential([*first, *parts, *noise, *last])

    with proofs.mirrored(sync_batch_norm=policy != "mixed_float16").scope():
        model = of_case(Case("many", model=make, policy=policy), run_eagerly=True)
    model.train_on_batch(words, CLASSES[:8])
    model.predict_on_batch(words)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.filterwarnings("error:.*split by rows")
@proofs.needs_split
def test_quantized_layers_are_split() -> None:
    model = mirrored_model(layers.Dense(16), layers.Dense(3))
    model.quantize("int8")
    model.predict_on_batch(SIX[:8])


@proofs.needs_split
def test_random_numbers_are_those_without_checks() -> None:
    """A check draws nothing from the generators of the process and of layers."""
    model = mirrored_model(layers.Dense(6), layers.GaussianNoise(1.0))
    before = np.random.get_state()[1].copy()
    model.train_on_batch(SIX[:22], SIX[:22])
    np.testing.assert_array_equal(before, np.random.get_state()[1])
    (state,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    assert int(ops.convert_to_numpy(state)[1]) == 1


class GraphConvolution(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(5, "tanh"), layers.Dense(3, "softmax")
        self.first.build((None, 6))
        self.last.build((None, 5))
        self.built = True

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        sent = ops.take(self.first(nodes), edges[:, 0], axis=0)
        count = ops.shape(nodes)[0]
        return self.last(ops.segment_sum(sent, edges[:, 1], num_segments=count))


def test_rows_that_do_not_correspond_are_exact() -> None:
    edges = np.random.default_rng(1).integers(0, 12, (30, 2)).astype("int32")
    batch = ops.convert_to_tensor(SIX[:12]), ops.convert_to_tensor(edges)
    classes = ops.convert_to_tensor(CLASSES)
    loss, eagerly = "sparse_categorical_crossentropy", proofs.BACKEND == "tensorflow"
    said = proofs.assert_exact(
        proofs.compiled(GraphConvolution, 0.1, loss, run_eagerly=eagerly),
        lambda model: [float(model.train_on_batch(batch, classes)) for _ in range(3)],
        tolerance=1e-5,
    )
    assert bool(said) == (proofs.BACKEND != "jax")


@proofs.needs_split
def test_a_proof_without_memory_says_nothing_about_the_layer(tmp_path: Path) -> None:
    """A later call, with the memory, is split."""
    file = str(tmp_path / "memory_is_used")

    def large(inputs: Any) -> Any:
        """The first call that finds a file runs out of memory."""
        if os.path.exists(file):
            os.remove(file)
            raise MemoryError("cannot allocate 9 GiB")
        return ops.tanh(inputs)

    model = mirrored_model(Apply(large), layers.Dense(3))
    Path(file).touch()
    # None says that it cannot be split.
    with warnings.catch_warnings(action="error", category=UserWarning):
        with pytest.raises(MemoryError, match="cannot allocate 9 GiB"):
            model.predict_on_batch(SIX[:8])
        model.predict_on_batch(SIX[:8])


class Squeeze(Apply):
    """Drops all axes with one entry, the rows too where there is one."""

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape[:1], x.dtype)


def columns_before_rows(x: Any) -> Any:
    return x * ops.cast(ops.arange(6) < ops.shape(x)[0], x.dtype)


@pytest.mark.one_backend("torch", "tensorflow")
@proofs.needs_split
@pytest.mark.parametrize("name", ["Squeeze", "Mask"])
@pytest.mark.parametrize("batch", [2, 3])
def test_one_row_on_each_replica(name: str, batch: int) -> None:
    if proofs.BACKEND == "tensorflow" and name == "Mask":
        pytest.skip("tested with `run_eagerly`")

    def make() -> Any:
        last = [Apply(columns_before_rows), layers.Dense(1)]
        if name == "Squeeze":
            last = [layers.Dense(1), Squeeze(ops.squeeze)]
        return proofs.sequential(layers.Dense(6), *last)

    fit = proofs.fits(SIX[:12], SINE[:12, 0] if name == "Squeeze" else SINE[:12], batch)
    assert proofs.assert_exact(proofs.compiled(make, 0.003), fit)


@proofs.needs_split
def test_classes_along_the_rows_of_a_metric() -> None:
    def make() -> Any:
        metric = keras.metrics.OneHotMeanIoU(8, axis=0, name="iou")
        model = proofs.sequential(layers.Dense(3))
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[metric])
        return model

    assert not proofs.assert_exact(make, proofs.fits(SIX[:24], SIX[:24, :3], 8))


@pytest.mark.one_backend("tensorflow")
@proofs.of_tensorflow
def test_warning_does_not_promise_numbers_of_tensorflow() -> None:
    import tensorflow as tf

    noise = Apply(lambda x: x * (1 + tf.random.normal(()) / 5))
    parts = layers.Dense(6), noise, layers.Dense(1)
    make = proofs.compiled(lambda: proofs.sequential(*parts), 0.003)
    _, said = proofs.trained(make, proofs.fits(SIX, SINE, 8), proofs.mirrored())
    assert len(said) == 1
    assert "exact but for numbers that the code draws by `tf.random`" in said[0]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.filterwarnings("error:.*cannot be split")
@proofs.needs_split
def test_numbers_that_another_thread_draws_are_not_drawn_again() -> None:
    # Such as the thread of a dataset that reads ahead from a generator.
    drawn: list[Any] = []
    another, ends = threading.Condition(), threading.Event()

    def draw() -> None:
        while not ends.wait(0.005):
            drawn.append((random.random(), np.random.normal(), random.randrange(100)))
            with another:
                another.notify_all()

    def after_a_draw(layer: Any, x: Any) -> Any:
        with layer.another:
            layer.another.wait(0.1)
        return ops.tanh(x @ layer.kernel)

    def model() -> keras.Model:
        layer = Own(after_a_draw, kernel=(6, 2))
        # Not the numbers, whose changes a proof would follow.
        layer.another = another
        return proofs.sequential(layer)

    thread = threading.Thread(target=draw)
    with proofs.mirrored().scope():
        made = proofs.compiled(model, 0.1)()
    random.seed(5)
    np.random.seed(5)
    thread.start()
    try:
        made.fit(SIX[:7], np.ones((7, 2)), batch_size=7, verbose=0)
    finally:
        ends.set()
        thread.join()
    python, numpy = random.Random(5), np.random.RandomState(5)
    for numbers in drawn:
        assert numbers == (python.random(), numpy.normal(), python.randrange(100))
    assert drawn
