"""A case: one thing that people train, and its training.

Nothing here imports `keras_strategies`: references are trained without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from harness import data as datasets
from harness import models
from harness.data import Data

SGD_TOLERANCE = 1e-5
ADAM_TOLERANCE = 1e-4

Results = dict[str, Any]


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """One thing that people train, and how close a strategy has to come.

    Args:
        name: what the test is called.
        model: makes the model.
        data: makes the data from a number of rows.
        feed: in which form `fit` and its siblings get the data.
        rows, batch, epochs: int; by default the last batch is not a whole one.
        scores_by_batch: bool, whether `evaluate` and `predict` get the batches that
            `fit` gets, with a last one of another size. Otherwise theirs are of one
            size, which may not divide by the replicas: half of the programs to trace.
        optimizer, loss, metrics, weighted_metrics: make what `compile` gets.
        compile: more arguments of `compile`.
        compile_alone: arguments of `compile` that the run without a strategy
            cannot have, and what it gets instead.
        fit: makes more arguments of `fit` from the data.
        sample_weight: bool, whether the data's weights are given.
        policy: the dtype policy that the model is made under.
        tolerance: relative to the largest magnitude of each tensor.
        optimized_graphs: bool, whether TensorFlow optimizes the graphs that it is
            trained with, as for users; see `harness.tensorflow_graphs`.
        script: trains a compiled model and returns what is to be equal; the model's
            state at the end is added if it is not among it.
        refused_by: backends on which Keras 3.15 cannot train this at all, and the
            error that it raises there.
        nightly: bool, whether other cases, which `make test` trains, reach all that
            this one does: it is for the nightly run, which says what exactly differs.
        reference: name of another case of the module with the same training on one
            device; it has that one's reference, by default one of its own.
        module: where the case is: an importable module with a list CASES that does not
            import `keras_strategies`.
    """

    name: str
    model: Callable[[], keras.Model] = models.dense
    data: Callable[[int], Data] = datasets.classes
    feed: datasets.Feed = datasets.arrays
    rows: int = 22
    batch: int = 8
    epochs: int = 2
    scores_by_batch: bool = False
    optimizer: Callable[[], Any] = sgd
    loss: Callable[[], Any] = lambda: "sparse_categorical_crossentropy"
    metrics: Callable[[], Any] = lambda: None
    weighted_metrics: Callable[[], Any] = lambda: None
    compile: dict[str, Any] = field(default_factory=dict)
    compile_alone: dict[str, Any] = field(default_factory=dict)
    fit: Callable[[Data], dict[str, Any]] = lambda data: {}
    sample_weight: bool = False
    policy: str = "float32"
    tolerance: float = SGD_TOLERANCE
    optimized_graphs: bool = False
    script: Callable[[Case, keras.Model, Data], Results] | None = None
    refused_by: dict[str, type[Exception]] = field(default_factory=dict)
    nightly: bool = False
    reference: str = ""
    module: str = "exactness.cases"

    def make_data(self) -> Data:
        data = self.data(self.rows)
        return data if self.sample_weight else Data(data.x, data.y)

    @property
    def scores_batch(self) -> int:
        """The batch size of `evaluate` and `predict`: two batches, or an odd one."""
        if self.scores_by_batch:
            return self.batch
        return self.rows if self.rows % 2 else self.rows // 2


def compiled(case: Case, **overrides: Any) -> keras.Model:
    """The case's model, compiled, from pinned seeds."""
    keras.utils.set_random_seed(7)
    with dtype_policy(case.policy):
        model = case.model()
        model.compile(
            **{
                "optimizer": case.optimizer(),
                "loss": case.loss(),
                "metrics": case.metrics(),
                "weighted_metrics": case.weighted_metrics(),
                **case.compile,
                **overrides,
            }
        )
    return model


def compiled_alone(case: Case) -> keras.Model:
    """The case's model for a training without a strategy.

    On TensorFlow without XLA, which strategies do not use there, and with its slots,
    because a program that creates them is traced twice.
    """
    if keras.backend.backend() != "tensorflow" or "jit_compile" in case.compile:
        return compiled(case, **case.compile_alone)
    model = compiled(case, **{"jit_compile": False, **case.compile_alone})
    is_kerass_own = type(model).train_step is keras.Model.train_step
    if is_kerass_own and model.built and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
    return model


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def fit_evaluate_predict(case: Case, model: keras.Model, data: Data) -> Results:
    """What most people do with a model."""
    given = case.feed(data, case.batch)
    steps = given.pop("steps", None)
    extra = {} if steps is None else {"steps_per_epoch": steps}
    history = model.fit(
        **{
            "epochs": case.epochs,
            "verbose": 0,
            "shuffle": False,
            **given,
            **extra,
            **case.fit(data),
        }
    )
    batch = case.scores_batch
    scores = model.evaluate(**case.feed(data, batch), verbose=0, return_dict=True)
    inputs = case.feed(Data(data.x, None), batch)
    outputs = model.predict(**inputs, verbose=0)
    return {"history": history.history, "evaluate": scores, "predict": outputs}


def train(case: Case, strategy: Any = None) -> Results:
    """Trains a case, under a strategy or without one, and says what came out."""
    if strategy is None:
        model = compiled_alone(case)
    else:
        with strategy.scope():
            model = compiled(case)
    with _graphs(case):
        results = (case.script or fit_evaluate_predict)(case, model, case.make_data())
    if "optimizer" not in results:
        results |= state_of(model)
    return as_arrays(results)


def _graphs(case: Case) -> contextlib.AbstractContextManager[None]:
    if not case.optimized_graphs or keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    from harness import tensorflow_graphs

    return tensorflow_graphs.optimized()


def state_of(model: keras.Model) -> Results:
    """The model's weights and its optimizer's variables, by number and path."""
    groups = {"weights": model.weights, "optimizer": model.optimizer.variables}
    return {
        group: {f"{i} {v.path}": as_arrays(v) for i, v in enumerate(variables)}
        for group, variables in groups.items()
    }


def as_arrays(results: Any) -> Any:
    """The same structure with NumPy arrays in it."""
    if isinstance(results, dict):
        return {key: as_arrays(value) for key, value in results.items()}
    if isinstance(results, (list, tuple)):
        return {i: as_arrays(value) for i, value in enumerate(results)}
    if isinstance(results, (int, float, np.ndarray, np.generic)):
        return np.asarray(results)
    return np.asarray(
        keras.ops.convert_to_numpy(keras.ops.cast(results, _dtype(results)))
    )


def _dtype(tensor: Any) -> str:
    name = keras.backend.standardize_dtype(tensor.dtype)
    return "float32" if name in ("bfloat16", "float16") else name


def without_phantom_step(case: Case, results: Results) -> Results:
    """The results with the number of steps that were really taken.

    Keras 3.15 on TensorFlow finds out inside the program that a generator has ended,
    and counts that step although it does not take it.
    """
    if keras.backend.backend() == "tensorflow" and case.feed is datasets.generator:
        true_steps = -(-case.rows // case.batch) * case.epochs
        for path in results["optimizer"]:
            if path.endswith("/iteration"):
                results["optimizer"][path] = np.asarray(true_steps)
    return results
