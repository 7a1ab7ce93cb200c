"""`keras-strategies doctor`: what it says, and doctors that find each other."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator

import pytest
from harness.forker import Forked, Forker
from harness.processes import TIMEOUT

import keras_strategies as ks
from keras_strategies.cluster import ClusterSpec
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.tools import doctor as doctors
from keras_strategies.tools.reachability import find_peers, listening

pytestmark = pytest.mark.one_backend("jax")


@pytest.fixture
def start_doctor(tmp_path) -> Iterator[Callable[..., Forked]]:
    """Starts a doctor."""
    script = tmp_path / "doctor.py"
    script.write_text(
        "import sys; from keras_strategies.tools.cli import main; sys.exit(main())"
    )
    with Forker() as forker:

        def start(name: str, timeout: str, **environment: str) -> Forked:
            arguments = ("doctor", "--timeout", timeout)
            log = tmp_path / f"{name}.log"
            return forker.start(log, str(script), *arguments, **environment)

        yield start


@pytest.fixture
def examine(capsys, monkeypatch) -> Callable[..., str]:
    """What a doctor of the cluster and its ports prints; it finds some problems."""

    def examined(problems: int, secret: str) -> str:
        monkeypatch.setenv("KS_CLUSTER_SECRET", secret)
        chosen = [each for each in doctors.CHECKS if each[0] in ("cluster", "ports")]
        monkeypatch.setattr(doctors, "CHECKS", tuple(chosen))
        assert doctors.doctor(timeout_seconds=0) == problems
        return capsys.readouterr().out

    return examined


def tf_config(cluster: dict, job: str = "worker", index: int = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def test_alone_it_says_versions_and_devices(start_doctor) -> None:
    process = start_doctor("alone", "0.5", KS_DEVICES_PER_WORKER="2")
    code, _ = process.wait(TIMEOUT)
    printed = process.text()
    assert code == 0, printed
    facts = dict(re.findall(r"^[ !] (\S+) +(.*)$", printed, re.M))
    assert facts["KS_DEVICES_PER_WORKER"] == "'2'"
    assert facts["MirroredStrategy()"] == "2 replicas: cpu:0, cpu:1"
    assert os.environ["KERAS_BACKEND"] in printed
    assert printed.count("none: this is the only worker") == 1
    assert printed.splitlines()[-3:] == [
        "next (0 problems)",
        "-" * 72,
        "  1  Train on 2 devices: `strategy = ks.MirroredStrategy()`.",
    ]


def test_releases_that_the_wheel_does_not_allow_are_named(monkeypatch) -> None:
    releases = {"keras": "3.15.1", "jax": "0.7.2", "torch": "2.99.0"}
    monkeypatch.setattr(doctors, "_version", lambda name: releases.get(name, ""))
    versions = doctors._versions(doctors.CheckContext(1.0))
    found = {each.what: each.found for each in versions}
    assert found["keras"] == "3.15.1"
    range_of_jax = r"0\.7\.2, not tested: this package takes .*>=0\.10.*"
    assert re.fullmatch(range_of_jax, found["jax"])
    assert found["torch"].startswith("2.99.0, not tested: ")
    assert found["tensorflow"] == "is not installed"


@pytest.mark.parametrize(
    ("context", "problems", "step"),
    [
        ({"backend": "jax"}, 1, "`export KERAS_BACKEND=torch`"),
        ({"installed": []}, 1, "Install a framework"),
        ({}, 1, "Fix the lines marked"),
        ({"devices": ["gpu:0"]}, 0, "`strategy = ks.OneDeviceStrategy('gpu:0')`"),
        ({"devices": ["gpu:0"]}, 2, "Fix the lines marked"),
        ({"devices": ["gpu:0"], "job": "worker"}, 0, "MultiWorkerMirroredStrategy()"),
        ({"devices": ["gpu:0"], "job": "ps"}, 0, "`ks.ParameterServerStrategy()`"),
    ],
)
def test_what_to_do_next(context: dict, problems: int, step: str) -> None:
    if job := context.pop("job", ""):
        cluster = {"chief": ["a:1"], "worker": ["b:1"], job: ["c:1"]}
        context["resolver"] = ks.cluster_resolver.SimpleClusterResolver(
            cluster, task_type="chief", task_id=0
        )
    given = {"backend": "torch", "installed": ["torch"], **context}
    found = doctors.next_steps(doctors.CheckContext(0.0, **given), problems)
    assert step in found[0]


@pytest.mark.parametrize(
    ("cluster", "backend", "lines"),
    [
        (
            {"worker": ["a:1", "b:1"]},
            "tensorflow",
            [
                "start and heartbeats    a:1; with `elastic`",
                "TensorFlow's server     a port of each worker, at all addresses",
                "programs that reach it can read and write files there",
                "protection              none: not authenticated, not encrypted",
                "reachable by            every machine that no firewall blocks",
            ],
        ),
        (
            {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
            "torch",
            [
                "Torch's store           a port of the chief",
                "Gloo or NCCL            ports of each worker",
                "reachable by            programs of all users of this machine",
            ],
        ),
        (
            {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1", "d:1"]},
            "jax",
            [
                "parameter servers       a:1, c:1, d:1",
                "protection              authenticated by KS_CLUSTER_SECRET, encrypted",
                "KS_CLUSTER_SECRET       64 characters",
            ],
        ),
        ({"worker": ["a:1"]}, "jax", ["ports                   none: a single"]),
    ],
)
def test_what_listens_and_how_it_is_protected(
    examine, monkeypatch, cluster: dict, backend: str, lines: list[str]
) -> None:
    resolver = ks.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=0
    )
    monkeypatch.setattr(doctors, "find_cluster", lambda: resolver)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    printed = examine(0, secret="0123456789abcdef" * 4)
    assert [line for line in lines if line not in printed] == [], printed
    assert "0123456789abcdef" not in printed


@pytest.mark.parametrize(
    ("secret", "job", "found"),
    [
        ("", "ps", "! KS_CLUSTER_SECRET       is not set; all tasks need the same"),
        ("short", "chief", "! KS_CLUSTER_SECRET       5 characters; at least 16"),
        ("", "evaluator", "  KS_CLUSTER_SECRET       is not set"),
    ],
)
def test_a_secret_that_is_missing_is_a_problem(
    examine, monkeypatch, secret: str, job: str, found: str
) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, job))
    assert found in examine(int(found.startswith("!")), secret)


def test_who_answers_and_who_does_not(capsys, monkeypatch) -> None:
    with socket.socket() as server, socket.socket() as silent:
        server.bind(("127.0.0.1", 0))
        server.listen()
        silent.bind(("127.0.0.1", 0))
        there, not_there = server.getsockname()[1], silent.getsockname()[1]
        (own,) = free_addresses(1)
        workers = [f"127.0.0.1:{there}", f"127.0.0.1:{not_there}"]
        workers += ["no-such-machine.invalid:1", "rank-3"]
        cluster = {"chief": [own], "worker": workers}
        monkeypatch.setenv("TF_CONFIG", tf_config(cluster, "chief"))
        assert doctors.doctor(timeout_seconds=0.3) == 1
    printed = capsys.readouterr().out
    assert "chief 0, the chief" in printed
    assert f"127.0.0.1:{there}  answers (another program than a doctor)" in printed
    assert re.search(rf"^! worker 1 +127.0.0.1:{not_there}  refused", printed, re.M)
    problems = len(re.findall("^! ", printed, re.M))
    assert problems >= 3 and f"next ({problems} problems)" in printed
    assert "the machine's name cannot be resolved" in printed
    assert "rank-3  the address is unknown on this machine" in printed


def test_what_cannot_be_is_shown(capsys, monkeypatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert doctors.doctor(timeout_seconds=0) == 1
    printed = capsys.readouterr().out
    assert "! cluster" in printed
    assert "TF_CONFIG is not JSON" in printed


@pytest.mark.slow(seconds=18)
@pytest.mark.multiprocess
def test_doctors_on_all_tasks_find_each_other(start_doctor) -> None:
    chief, worker = free_addresses(2)
    cluster = {"chief": [chief], "worker": [worker]}
    processes = [
        start_doctor(job, "50", TF_CONFIG=tf_config(cluster, job)) for job in cluster
    ]
    assert [process.wait(TIMEOUT)[0] for process in processes] == [0, 0]
    printed = "".join(process.text() for process in processes)
    assert printed.count("0 problems") == 2, printed
    assert printed.count("  answers\n") == 2


def test_a_doctor_that_is_another_task_is_a_problem() -> None:
    # Two machines have each other's address.
    first, second = free_addresses(2)
    spec = ClusterSpec({"worker": [first, second, *free_addresses(1)]})
    with listening("worker 2", second) as listener:
        peers = find_peers(spec, "worker 0", timeout=0.3)
    assert not listener.problem
    assert (peers[0].answers, peers[0].is_doctor) == (False, True)
    assert peers[0].found == "the doctor of worker 2 answers"
    assert listener.visitors == {"worker 0"}


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with listening("worker 0", address) as listener:
            assert listener.problem == "another program uses the port already"
    with listening("worker 0", "rank-1") as listener:
        assert "not a task address" in listener.problem
