"""The manifests of `examples/kubernetes`, and what their pods find."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.kubernetes_manifests import Pod, load, pods
from harness.forker import Forked, Forker
from harness.processes import TIMEOUT

from keras_strategies.cluster import find_cluster
from keras_strategies.cluster.environment import cluster_variables
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.parameter_server.wire.cluster_keys import cluster_keys

pytestmark = pytest.mark.one_backend

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = {
    path.stem: load(path) for path in sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
}
#: How they connect, without a framework.
SYNCHRONOUS = """
from keras_strategies.cluster import find_cluster
from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.cluster.spec import worker_addresses
resolver = find_cluster()
addresses = worker_addresses(resolver.cluster_spec())
group = WorkerGroup.join(addresses, resolver.task_id, {}, timeout=300)
print(group.gather_values("numbers", resolver.task_id))
group.leave()
"""
#: As `python -m keras_strategies`.
COMMAND_LINE = """
import sys
from keras_strategies.tools.cli import main
sys.exit(main())
"""
PARAMETER_SERVERS = """
import time
import keras
import keras_strategies as ks
resolver = ks.cluster_resolver.find_cluster()
if resolver.task_type == "chief":
    with ks.ParameterServerStrategy(start_seconds=90) as strategy:
        with strategy.scope():
            total = keras.Variable(0.0, name="total", trainable=False)
        coordinator = ks.ClusterCoordinator(strategy)
        # One worker could do all, and the other would wait for a cluster that is gone.
        while coordinator.status().workers_alive < 2:
            time.sleep(0.1)
        for _ in range(4):
            coordinator.schedule(lambda: total.assign_add(1.0))
        coordinator.join(300)
        print(strategy, float(total.numpy()))
else:
    ks.Server(resolver).join()
"""


def objects(name: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in MANIFESTS[name] if each["kind"] == kind]


# --- The API ------------------------------------------------------------------


def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.one_backend("jax")
@pytest.mark.parametrize("name", MANIFESTS)
def test_objects_refer_to_each_other(name: str) -> None:
    [service], [policy] = objects(name, "Service"), objects(name, "NetworkPolicy")
    [claim] = objects(name, "PersistentVolumeClaim")
    labels = service["spec"]["selector"]
    assert policy["spec"]["podSelector"] == {"matchLabels": labels}
    [rule] = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    for job in objects(name, "Job"):
        spec, template = job["spec"], job["spec"]["template"]
        pod = template["spec"]
        # What the API server requires of Indexed Jobs with these policies.
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"]
        assert pod["restartPolicy"] == "Never"
        [_, on_exit] = spec["podFailurePolicy"]["rules"]
        assert on_exit["onExitCodes"]["containerName"] == container(job)["name"]
        assert template["metadata"]["labels"] == labels
        assert pod["subdomain"] == service["metadata"]["name"]
        assert pod["automountServiceAccountToken"] is False
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        mounts = {mount["name"] for mount in container(job).get("volumeMounts", [])}
        assert set(volumes) == mounts
        found = [volume.get("persistentVolumeClaim") for volume in volumes.values()]
        claims = [each["claimName"] for each in found if each is not None]
        is_lead = container(job)["name"] == "lead"
        assert claims == ([] if is_lead else [claim["metadata"]["name"]])


# --- What the pods find -------------------------------------------------------


@pytest.mark.one_backend("jax")
@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pod_finds_its_task_at_its_own_address(name: str, monkeypatch) -> None:
    for variable in cluster_variables():
        monkeypatch.delenv(variable)
    tasks = []
    for pod in pods(MANIFESTS[name]):
        if pod.is_lead:
            continue
        with monkeypatch.context() as patch:
            for variable, text in pod.environment.items():
                patch.setenv(variable, text)
            resolver = find_cluster()
            assert resolver is not None
            assert resolver.task_type is not None and resolver.task_id == pod.index
            spec = resolver.cluster_spec()
            assert spec.task_address(resolver.task_type, pod.index) == pod.address
            assert pod.job.endswith(resolver.task_type) or resolver.num_workers == 4
            if "ps" in spec.jobs:
                cluster_keys()  # The secret is long enough.
            tasks.append((resolver.task_type, resolver.task_id))
    expected = [(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    assert tasks == expected


def on_this_machine(found: list[Pod]) -> list[dict[str, str]]:
    """The environment of each pod, with addresses of the loopback."""
    text = json.dumps([pod.environment for pod in found])
    for pod, address in zip(found, free_addresses(len(found)), strict=True):
        text = text.replace(pod.address, address)
    environments: list[dict[str, str]] = json.loads(text)
    return environments


def run_pods(
    name: str, forker: Forker, folder: Path, command: Callable[[Pod], list[str]]
) -> str:
    """What processes print that have the environments of a manifest's pods.

    `command` gives a pod's script and its arguments.
    """
    found = pods(MANIFESTS[name])
    processes = []
    environments = on_this_machine(found)
    lead = folder / "lead.py"
    lead.write_text(COMMAND_LINE)
    port = environments[0].get("KS_LEAD", "").rpartition(":")[2]
    for pod, variables in zip(found, environments, strict=True):
        del variables["HOME"]
        variables["KERAS_BACKEND"] = os.environ["KERAS_BACKEND"]
        log = folder / f"{pod.job}-{pod.index}.log"
        of_lead = [str(lead), *pod.command[3:-1], port]
        given = of_lead if pod.is_lead else command(pod)
        processes.append(forker.start(log, *given, **variables))
    try:
        codes = [process.wait(TIMEOUT)[0] for process in processes]
    except AssertionError as error:
        # The one that waits is not the one that has failed.
        raise AssertionError(f"{error}\n{_texts(processes)}") from error
    finally:
        for process in processes:
            process.kill()
    output = _texts(processes)
    assert codes == [0] * len(processes), output
    return output


def _texts(processes: list[Forked]) -> str:
    return "".join(process.text() for process in processes)


@pytest.mark.one_backend("jax")
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "script", "printed"),
    [
        ("multi_worker", SYNCHRONOUS, ["[0, 1, 2, 3]"] * 4),
        (
            "parameter_servers",
            PARAMETER_SERVERS,
            ["<ParameterServerStrategy with 2 workers and 2 parameter servers> 4.0"],
        ),
    ],
)
def test_processes_with_the_environment_of_the_pods_connect(
    name: str, script: str, printed: list[str], forker: Forker, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    output = run_pods(name, forker, tmp_path, lambda pod: [str(path)])
    assert [line for line in output.splitlines() if line in printed] == printed, output


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "fewer", "printed"),
    [
        ("multi_worker", {"--epochs": "1"}, "4 workers, 4 replicas"),
        ("parameter_servers", {"--epochs": "1", "--rows": "5000"}, "AUC of clicks"),
    ],
)
def test_the_commands_of_the_pods_train(
    name: str, fewer: dict[str, str], printed: str, forker: Forker, tmp_path: Path
) -> None:
    def command(pod: Pod) -> list[str]:
        _, script, *arguments = pod.command
        arguments[arguments.index("--backup") + 1] = str(tmp_path / "backup")
        # The last ones count.
        more = [text for option in fewer.items() for text in option]
        return [str(EXAMPLES / script), *arguments, *more]

    output = run_pods(name, forker, tmp_path, command)
    assert output.count(printed) == 1, output
