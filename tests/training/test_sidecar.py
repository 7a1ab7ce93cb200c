"""`SidecarEvaluator`: beside training, in a process and as a cluster's task."""

from __future__ import annotations

import inspect
import json
import os
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.processes import launch, write_script

import keras_strategies as ks
from keras_strategies.cluster.resolvers.local_processes import free_addresses

pytestmark = pytest.mark.one_backend

SECONDS = 60.0


def model():
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return made


def data(seed):
    x = np.random.default_rng(seed).normal(size=(32, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


# For scripts, which have the same model and data.
MODEL = f"""
import keras
import numpy as np
import keras_strategies as ks

{inspect.getsource(model)}

{inspect.getsource(data)}
"""


@pytest.mark.parametrize("pattern", ["{epoch}.keras", "{epoch}.weights.h5"])
def test_each_checkpoint_gives_what_training_saw(tmp_path, pattern) -> None:
    """The file of each epoch is evaluated on other data than it is trained on."""
    trained, expected, steps = model(), [], []

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None) -> None:
            expected.append(trained.evaluate(*data(1), verbose=0, return_dict=True))

    save = keras.callbacks.ModelCheckpoint(
        str(tmp_path / pattern), save_weights_only=pattern.endswith("weights.h5")
    )
    trained.fit(*data(0), batch_size=8, epochs=3, callbacks=[save, Evaluate()])

    class Steps(keras.callbacks.Callback):
        def on_test_end(self, logs=None) -> None:
            steps.append(int(self.model.optimizer.iterations.numpy()))

    options = {"max_evaluations": 3, "callbacks": [Steps()]}
    found = ks.SidecarEvaluator(model(), data(1), tmp_path, **options).start()
    names = [pattern.format(epoch=i) for i in (1, 2, 3)]
    assert [Path(e.path).name for e in found] == names
    assert [e.step for e in found] == steps == [4, 8, 12]
    for evaluation, logs in zip(found, expected, strict=True):
        assert evaluation.logs == pytest.approx(logs, rel=1e-5)


@pytest.mark.one_backend("torch")
def test_a_file_that_is_written_again_is_evaluated_again(tmp_path) -> None:
    folder = tmp_path / "later"
    evaluator = ks.SidecarEvaluator(model(), data(1), folder, timeout_seconds=SECONDS)
    thread = threading.Thread(target=evaluator.start)
    thread.start()
    try:
        trained = model()
        folder.mkdir()
        for i in range(2):
            trained.fit(*data(0), verbose=0)
            # As a strategy saves: whole, or not at all.
            trained.save(tmp_path / "part.keras")
            (tmp_path / "part.keras").rename(folder / "model.keras")
            until = time.monotonic() + SECONDS
            while len(evaluator.evaluations) <= i and time.monotonic() < until:
                time.sleep(0.02)
    finally:
        evaluator.stop()
        thread.join(SECONDS)
    assert [e.step for e in evaluator.evaluations] == [1, 2]


def test_nothing_comes_or_what_is_no_checkpoint_of_the_model(tmp_path) -> None:
    evaluator = ks.SidecarEvaluator(model(), data(1), tmp_path, timeout_seconds=0.1)
    with pytest.raises(ks.errors.ClusterTimeoutError, match="0 evaluations"):
        evaluator.start()
    broken = tmp_path / "1.weights.h5"
    broken.write_bytes(b"not a checkpoint")
    os.utime(broken, (1.0, 1.0))
    evaluator = ks.SidecarEvaluator(model(), data(1), tmp_path)
    with pytest.raises(ks.errors.CheckpointError, match=r"1\.weights\.h5 cannot be"):
        evaluator.start()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "compiled and built"),
        ({"max_evaluations": 0}, "max_evaluations"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_arguments_that_cannot_be(tmp_path, changed, message) -> None:
    arguments = {"model": model(), "data": data(1), "checkpoint_dir": tmp_path}
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        ks.SidecarEvaluator(**{**arguments, **changed})


CLUSTER = (
    MODEL
    + """
resolver = ks.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type == "evaluator":
    evaluator = ks.SidecarEvaluator(model(), data(1), here / "saved")
    found = evaluator.start()
    (here / "found.json").write_text(json.dumps([[e.step, e.logs] for e in found]))
elif resolver.task_type in ("worker", "ps"):
    ks.Server(resolver).join()
else:
    strategy = ks.ParameterServerStrategy(resolver, max_staleness=0)
    with strategy.scope():
        made = model()
    save = keras.callbacks.ModelCheckpoint(str(here / "saved" / "{epoch}.keras"))
    (here / "saved").mkdir()
    made.fit(*data(0), batch_size=8, epochs=3, callbacks=[save], shuffle=False)
    logs = made.evaluate(*data(1), return_dict=True)
    (here / "logs.json").write_text(json.dumps(logs))
    strategy.close()
"""
)


def assert_evaluated(folder: Path, errors: str) -> None:
    found = json.loads((folder / "found.json").read_text())
    assert [step for step, _ in found] == [4, 8, 12]
    # What training evaluated itself in the end.
    last = json.loads((folder / "logs.json").read_text())
    assert found[-1][1] == pytest.approx(last, rel=1e-4)
    assert "3.keras at step 12: " in errors


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_launchers_evaluator_sees_every_checkpoint(tmp_path) -> None:
    script = write_script(tmp_path, CLUSTER)
    process = launch(
        *("--workers", "1", "--ps", "1", "--chief", "--evaluator"),
        *("--grace-seconds", "60", script),
    )
    assert process.returncode == 0, process.stderr
    assert_evaluated(tmp_path, process.stderr)
    assert "[evaluator 0] 3.keras at step 12: " in process.stderr


@pytest.mark.one_backend("torch")
@pytest.mark.multiprocess
def test_an_evaluator_task_sees_every_checkpoint(forker, tmp_path) -> None:
    """Without the launcher: when training has ended, the evaluator gets a signal."""
    script = write_script(tmp_path, CLUSTER)
    jobs = ("worker", "ps", "chief", "evaluator")
    addresses = zip(jobs, free_addresses(4), strict=True)
    config: dict = {"cluster": {job: [address] for job, address in addresses}}
    given = {"KS_CLUSTER_SECRET": "correct horse battery staple"}
    started = {}
    for job in jobs:
        given["TF_CONFIG"] = json.dumps({**config, "task": {"type": job, "index": 0}})
        started[job] = forker.start(tmp_path / f"{job}.log", script, **given)
    for job in ("chief", "worker", "ps"):
        assert started[job].wait(SECONDS)[0] == 0, started[job].text()
    os.kill(started["evaluator"].pid, signal.SIGTERM)
    code, _ = started["evaluator"].wait(SECONDS)
    text = started["evaluator"].text()
    assert code == 0, text
    assert_evaluated(tmp_path, text)
