"""Tools beside Keras give under a strategy what they give on one device.

Packages that `make env` does not install are tested where they are: the page says with
which releases. Those of trackers log what `fit` returns, once, on the chief.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.nightly
BACKEND = keras.backend.backend()
BATCH, EPOCHS = 16, 3


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Fifty rows, which leave two for the last batch."""
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    return x, x[:, :1]


def make(strategy: Any, units: int = 4, rate: float = 0.1) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        dense = [keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *dense])
        model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    return model


def fit(strategy: Any, callbacks: list[Any]) -> dict[str, list[float]]:
    """The history of a training of uneven batches."""
    history = make(strategy).fit(
        *rows(), batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks
    )
    return {name: [*map(float, values)] for name, values in history.history.items()}


@pytest.fixture
def strategies() -> list[Any]:
    return [ks.OneDeviceStrategy("cpu:0"), ks.MirroredStrategy(["cpu:0", "cpu:1"])]


def with_mlflow(strategy: Any, folder: str) -> dict[str, list[float]]:
    import mlflow

    if not is_chief(strategy):
        return fit(strategy, [])
    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    # By default files of a run go to the folder of the process.
    experiment = mlflow.create_experiment("tests", f"file://{folder}/files")
    with mlflow.start_run(experiment_id=experiment):
        return fit(strategy, [mlflow.keras.MlflowCallback()])


def with_wandb(strategy: Any, folder: str) -> dict[str, list[float]]:
    import wandb

    if not is_chief(strategy):
        return fit(strategy, [])
    with wandb.init(project="tests", mode="offline", dir=folder) as run:
        log = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: run.log({"epoch": epoch, **logs})
        )
        history = fit(strategy, [log])
        last = {name: run.summary[name] for name in history}
    assert last == {name: values[-1] for name, values in history.items()}
    return history


def is_chief(strategy: Any) -> bool:
    resolver = strategy.cluster_resolver
    return resolver is None or resolver.is_chief


def worker(name: str, workers: int, folder: str) -> dict[str, list[float]]:
    if workers == 1:
        return TRACKED[name](ks.MirroredStrategy(["cpu:0", "cpu:1"]), folder)
    return TRACKED[name](ks.MultiWorkerMirroredStrategy(), folder)


TRACKED = {"mlflow": with_mlflow, "wandb": with_wandb}


@pytest.mark.one_backend
@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", TRACKED)
def test_a_tracker_logs_the_history(name, workers, tmp_path, monkeypatch) -> None:
    pytest.importorskip(name)
    # MLflow sets it, too.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    # Trackers leave threads and processes behind, until the process ends.
    histories = ks.launch(worker, workers, (name, workers, str(tmp_path)))
    alone = ks.OneDeviceStrategy("cpu:0")
    expected = fit(alone, [])
    for history in histories:
        for key, values in expected.items():
            assert history[key] == pytest.approx(values, rel=1e-5)
    if name == "mlflow":
        assert logged_by_mlflow(str(tmp_path)) == [histories[0]]
    else:
        assert len([*tmp_path.glob("wandb/offline-run-*/*.wandb")]) == 1


def logged_by_mlflow(folder: str) -> list[dict[str, list[float]]]:
    """The metrics of each run, by epoch."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    client = mlflow.MlflowClient()
    return [
        {
            name: [e.value for e in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        for run in client.search_runs(
            [client.get_experiment_by_name("tests").experiment_id]
        )
    ]


def test_trials_of_keras_tuner_score_as_on_one_device(strategies, tmp_path) -> None:
    keras_tuner = pytest.importorskip("keras_tuner")
    scores = []
    for number, strategy in enumerate(strategies):
        tuner = keras_tuner.GridSearch(
            lambda hp, strategy=strategy: make(
                strategy, hp.Choice("units", [2, 8]), hp.Choice("rate", [0.1, 0.01])
            ),
            objective="val_loss",
            directory=tmp_path / f"{number}",
        )
        given = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        tuner.search(*rows(), validation_data=rows(), epochs=EPOCHS, **given)
        trials = tuner.oracle.trials.values()
        scores.append(
            {str(trial.hyperparameters.values): trial.score for trial in trials}
        )
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
    assert len(scores[0]) == 4


def test_trials_of_optuna_have_the_values_of_one_device(strategies) -> None:
    optuna = pytest.importorskip("optuna")
    grid = {"units": [2, 8], "rate": [0.1, 0.01]}
    values = []
    for strategy in strategies:

        def objective(trial: Any, strategy: Any = strategy) -> float:
            units = trial.suggest_int("units", 2, 8)
            model = make(strategy, units, trial.suggest_float("rate", 0.01, 0.1))
            found = model.fit(*rows(), batch_size=BATCH, epochs=EPOCHS, verbose=0)
            return found.history["loss"][-1]

        study = optuna.create_study(sampler=optuna.samplers.GridSampler(grid, seed=0))
        study.optimize(objective)
        values.append({str(trial.params): trial.value for trial in study.trials})
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert len(values[0]) == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_datasets_of_hugging_face_train_as_on_one_device(strategies, is_stream) -> None:
    datasets = pytest.importorskip("datasets")
    x, y = rows()
    found = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    losses = []
    for strategy in strategies:
        source: Any = batches_of(found, is_stream)
        steps = 3 if is_stream else None
        history = make(strategy).fit(
            source, epochs=EPOCHS, steps_per_epoch=steps, verbose=0
        )
        losses.append(history.history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def batches_of(found: Any, is_stream: bool) -> Any:
    """A loader, or batches without an end, as the page says."""
    import torch

    if not is_stream:

        def collate(each: list[Any]) -> tuple[Any, Any]:
            return tuple(torch.stack([row[name] for row in each]) for name in "xy")

        loaded = found.with_format("torch")
        return torch.utils.data.DataLoader(loaded, batch_size=BATCH, collate_fn=collate)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            for batch in found.to_iterable_dataset().with_format("numpy").batch(BATCH):
                yield (
                    np.asarray(batch["x"], "float32"),
                    np.asarray(batch["y"], "float32"),
                )

    return batches()


def test_the_profiler_of_the_backend_sees_the_steps(strategies, tmp_path) -> None:
    alone, mirrored = strategies
    expected = fit(alone, [])
    with profiler(tmp_path) as callbacks:
        history = fit(mirrored, callbacks)
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-5)
    pattern = "*.json" if BACKEND == "torch" else "**/*.xplane.pb"
    (trace,) = tmp_path.glob(pattern)
    # By the name that the backend has for it.
    names = {"jax": b"tanh", "torch": b'"aten::tanh_backward"', "tensorflow": b"Tanh"}
    # On Torch both replicas have each of the four steps of an epoch.
    least = 2 * 4 * EPOCHS if BACKEND == "torch" else 1
    assert trace.read_bytes().count(names[BACKEND]) >= least


@contextlib.contextmanager
def profiler(folder: Path) -> Iterator[list[Any]]:
    """Profiles to files of a folder; gives the callbacks for it."""
    if BACKEND == "jax":
        import jax

        with jax.profiler.trace(str(folder)):
            yield []
    elif BACKEND == "torch":
        import torch

        # Replicas are threads.
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every) as profile:
            yield []
        profile.export_chrome_trace(str(folder / "trace.json"))
    else:
        yield [keras.callbacks.TensorBoard(str(folder), profile_batch=(2, 4))]
