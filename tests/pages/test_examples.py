"""The examples run, and print what they say.

One that trains by `fit` runs here, on few rows and in this process; all of them, each
in processes of its own as users start it, run each night.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from harness.forker import Forker
from harness.processes import output_of

import keras_strategies as ks
from keras_strategies.cluster.resolvers.local_processes import free_addresses

pytestmark = pytest.mark.one_backend

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Runs a script of `examples/` as users start it; returns its output."""
    return output_of([sys.executable, str(EXAMPLES / name), *arguments])


def use_few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a script that trains on scikit-learn's digits their first rows only.

    It may set the number of virtual devices, which is that of the tests already.
    """
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    few = images[:500], labels[:500]
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda **options: few)
    monkeypatch.setattr(ks, "set_virtual_cpu_devices", lambda count: None)


@pytest.mark.one_backend("tensorflow")
def test_demo_trains_as_one_device_does_on_few_rows(monkeypatch, capsys) -> None:
    use_few_digits(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--backend", keras.backend.backend()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    assert end.value.code == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["difference"] < 1e-5
    assert row["losses"][0] == pytest.approx(row["losses"][1], rel=1e-5)
    assert row["losses"][1] < 2.3  # That of ten classes before any training.


@pytest.mark.nightly
def test_demo_prints_one_device_beside_two() -> None:
    output = run_example("demo.py")
    rows = re.findall(
        r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+)% +([\d.]+)% +(\S+)$", output, re.M
    )
    assert [row[0] for row in rows] == ["jax", "torch", "tensorflow"]
    # All backends begin with the same weights.
    assert len({loss[:6] for row in rows for loss in row[1:3]}) == 1
    assert all(float(row[5]) < 1e-5 and float(row[4]) > 80 for row in rows)


def test_the_demo_installs_no_tools_of_developers() -> None:
    command = ["make", "-n", "-B", "demo"]
    steps = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True)
    (install,) = [line for line in steps.stdout.splitlines() if "pip install" in line]
    assert "[jax,torch]" in install and "test" not in install
    assert "minutes" in steps.stdout.partition("pip install")[0]


def printed_by(output: str) -> dict[str, tuple[float, float]]:
    """What the multi-worker example says of its test, by who says it."""
    found = re.findall(
        r"^(.*)test loss: ([\d.]+), accuracy: ([\d.]+)", output, re.MULTILINE
    )
    return {who: (float(loss), float(accuracy)) for who, loss, accuracy in found}


def with_tf_config(folder: Path, script: str, *arguments: str) -> str:
    """Two workers, as one starts them by hand; returns what they print."""
    logs = [folder / f"worker{i}.log" for i in range(2)]
    with Forker(imports_strategies=False) as forker:
        workers = forker.start_workers(logs, script, *arguments)
        codes = [worker.wait(300)[0] for worker in workers]
    output = "".join(worker.text() for worker in workers)
    assert codes == [0, 0], output
    return output


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_multi_worker_example_prints_the_same_however_it_is_started(
    tmp_path: Path,
) -> None:
    script = str(EXAMPLES / "multi_worker.py")
    arguments = ("--epochs", "2")
    one = run_example("multi_worker.py", *arguments)
    assert "1 workers, 1 replicas" in one
    [expected] = printed_by(one).values()

    keras_strategies = [sys.executable, "-m", "keras_strategies"]
    launcher = [*keras_strategies, "launch", "--workers", "2", script, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += [f"--master-port={free_addresses(1)[0].split(':')[1]}", script]
    outputs = {
        "launcher": output_of(launcher),
        "torchrun": output_of([*torchrun, *arguments]),
        "TF_CONFIG": with_tf_config(tmp_path, script, *arguments),
    }
    for how, output in outputs.items():
        # Said by the chief, and by nobody else.
        assert output.count("2 workers, 2 replicas") == 1, f"{how}: {output}"
        assert output.count("Epoch 2/2") == 1, f"{how}: {output}"
        [found] = printed_by(output).values()
        assert found == pytest.approx(expected, rel=1e-3), how


@pytest.mark.nightly
def test_mnist_example_trains_without_a_network() -> None:
    output = run_example(
        "mirrored_mnist.py", "--devices", "cpu:0,cpu:1", "--epochs", "4"
    )
    accuracy = re.search(r"test accuracy: ([\d.]+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.5


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_recommender_finds_the_tastes_that_it_was_not_told() -> None:
    output = run_example("recommender.py")
    auc = re.search(r"never shown: ([\d.]+)", output)
    liked = re.search(r"users like (\d+)%", output)
    assert auc is not None and liked is not None, output
    assert float(auc[1]) > 0.9
    assert int(liked[1]) > 90
    # Three epochs of 200 steps, each done once; ten for the test, five to recommend.
    assert re.search(r"\nsteps +615 done, 0 under way, 0 queued\n", output), output


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the tutorial is TensorFlow's"
)
def test_the_tutorial_on_parameter_servers_learns_its_rule() -> None:
    output = run_example("parameter_server_tutorial.py")
    accuracies = re.findall(r"accuracy is ([\d.]+)\.", output)
    assert len(accuracies) == 4 and float(accuracies[-1]) > 0.95, output
    loss = re.search(r"Final loss is ([\d.]+)\.", output)
    accuracy = re.search(r"Evaluation accuracy: ([\d.]+)\.", output)
    assert loss is not None and accuracy is not None, output
    assert float(loss[1]) < 0.1
    assert float(accuracy[1]) > 0.95


@pytest.mark.nightly
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="a process for each device"
)
def test_adapters_of_quantized_weights_learn_and_take_the_memory_of_the_plan() -> None:
    output = run_example("adapters.py", "--devices", "cpu:0,cpu:1")
    accuracies = re.findall(r"accuracy by \w+: .*?([\d.]+)$", output, re.MULTILINE)
    assert len(accuracies) == 2 and min(map(float, accuracies)) > 0.9, output
    planned, used = map(int, re.findall(r"(\d+) (?:planned|in use)", output))
    assert used == pytest.approx(planned, rel=0.01)


@pytest.mark.nightly
def test_the_portable_loop_equals_one_device(backend_name) -> None:
    arguments = ("--backend", backend_name, "--check", "--epochs", "2")
    output = run_example("custom_loop.py", *arguments)
    gap = re.search(r"largest difference to one device: (\S+)", output)
    assert gap is not None, output
    assert float(gap[1]) < 1e-4


@pytest.mark.nightly
def test_the_gan_reaches_the_whole_ring(backend_name) -> None:
    output = run_example("gan.py", "--backend", backend_name, "--steps", "1000")
    found = re.search(r"circle: ([\d.]+); sectors reached: (\d+)/12", output)
    assert found is not None, output
    assert float(found[1]) < 0.2
    assert int(found[2]) >= 8


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="it is written with TensorFlow"
)
def test_the_migrated_script_trains_on_two_replicas(monkeypatch, capsys) -> None:
    two = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    monkeypatch.setattr(ks, "MirroredStrategy", lambda: two)
    script = EXAMPLES / "migrate_from_tf_distribute" / "after.py"
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert float(lines[-1].split()[-1]) > 0.8


@pytest.mark.nightly
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="each device needs a process"
)
def test_the_sharded_transformer_learns_as_one_device_does() -> None:
    output = run_example("sharded_transformer.py", "--model-parallel", "2")
    found = {
        name: float(re.search(rf"{name}: ([\d.e+-]+)", output)[1])
        for name in ("accuracy", "largest difference to one device")
    }
    assert found["accuracy"] > 0.9
    assert found["largest difference to one device"] < 1e-3
    is_saved = "saved in parts as checkpoint 1" in output
    assert is_saved == (keras.backend.backend() != "tensorflow")
    if keras.backend.backend() == "jax":
        assert "peak of a step per device" in output
