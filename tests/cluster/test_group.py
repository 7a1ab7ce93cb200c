"""Workers meet, agree, and hear of one another's end: real sockets, real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.processes import assert_gone, wait_until

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.cluster.group.lead_start import listen
from keras_strategies.cluster.own_address import own_address
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.errors import ClusterError, WorkerError

pytestmark = pytest.mark.one_backend("jax")

SAME = {"backend": "none"}


def everywhere(groups, call):
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(call, group) for group in groups]
        return [future.exception(60) or future.result() for future in futures]


def join_all(addresses, timeout=10.0, indices=None, **options):
    return everywhere(
        range(len(addresses)) if indices is None else indices,
        lambda index: WorkerGroup.join(addresses, index, SAME, timeout, **options),
    )


@pytest.fixture
def three():
    groups = join_all(free_addresses(3))
    yield groups
    everywhere(groups, WorkerGroup.leave)


def test_workers_learn_of_one_another(three):
    for index, group in enumerate(three):
        assert (group.index, group.count) == (index, 3)
        assert [member["index"] for member in group.members] == [0, 1, 2]
        assert {member["pid"] for member in group.members} == {os.getpid()}
        assert group.own_host == "127.0.0.1"


def test_the_chief_prints_a_line_for_each_worker_that_comes(capsys):
    groups = join_all(free_addresses(2))
    everywhere(groups, WorkerGroup.leave)
    waiting, *ready = capsys.readouterr().err.splitlines()
    assert waiting.startswith("keras_strategies: waiting for 2 workers at 127.0.0.1:")
    assert sorted(line.split(" at ")[0] for line in ready) == [
        "keras_strategies: worker 0 is ready",
        "keras_strategies: worker 1 is ready",
    ]
    assert ", 1 of 2 (" in ready[0] and ", 2 of 2 (" in ready[1]


def test_values_are_gathered_in_the_order_of_workers(three):
    for turn in range(20):
        found = everywhere(three, lambda g, i=turn: g.gather_values("x", [g.index, i]))
        assert found == [[[0, turn], [1, turn], [2, turn]]] * 3


def test_large_payloads_arrive_whole(three):
    large = 5_000_000
    found = everywhere(three, lambda g: g.gather_values("x", str(g.index) * large))
    assert all(len(part) == large for parts in found for part in parts)
    assert [part[0] for part in found[1]] == ["0", "1", "2"]


def test_the_chief_broadcasts(three):
    found = everywhere(three, lambda g: g.broadcast("x", [g.index]))
    assert found == [[0]] * 3


def test_agreement_says_who_has_what(three):
    everywhere(three, lambda g: g.agree("the batch size", 32))
    found = everywhere(three, lambda g: g.agree("the batch size", 32 + (g.index == 2)))
    assert all(isinstance(error, ClusterError) for error in found)
    assert "worker 2 has 33" in str(found[0])


def test_workers_that_do_different_things_are_told(three):
    found = everywhere(three, lambda g: g.barrier("a" if g.index else "b"))
    assert all(isinstance(error, WorkerError) for error in found)
    assert "'b'" in str(found[1])
    assert "All workers must make the same calls" in str(found[1])


def test_a_chief_that_never_comes_is_named():
    [found] = join_all(free_addresses(2), timeout=1.0, indices=[1])
    assert isinstance(found, WorkerError)
    assert "Worker 1 could not reach the chief at 127.0.0.1:" in str(found)


def test_an_address_that_cannot_be_listened_at_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address, match in (
            (f"127.0.0.1:{server.getsockname()[1]}", "another program listens there"),
            # From a block that is set aside for documentation.
            ("192.0.2.1:4711", "must be an address of this"),
        ):
            with pytest.raises(ClusterError, match=match):
                WorkerGroup.join([address, "127.0.0.1:1"], 0, SAME, timeout=30)


def test_something_else_at_the_chiefs_port_is_no_chief():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve():
            try:
                while True:
                    connected, _ = server.accept()
                    connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connected.close()
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(WorkerError, match="not a chief"):
            WorkerGroup.join([f"127.0.0.1:{port}", "127.0.0.1:1"], 1, SAME, timeout=1)
        server.shutdown(socket.SHUT_RDWR)


def test_the_hub_finds_another_port_beside_a_launcher():
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = f"127.0.0.1:{server.getsockname()[1]}"
        groups = join_all([first, "rank-1"], shares_port=True)
        found = everywhere(groups, lambda g: g.gather_values("x", g.index))
        assert found == [[0, 1]] * 2
        everywhere(groups, WorkerGroup.leave)


def test_a_failure_is_told_to_the_others(three):
    three[1].progress = "step 7 of fit"
    three[1].report(ValueError("bad\nrows"))
    for index in (0, 2):
        loss = three[index].loss(wait=10)
        assert loss is not None and loss.rank == 1
        assert "step 7 of fit: ValueError: bad." in str(loss)
    assert three[1].loss() is None


def test_a_failure_after_a_gather_outlasts_a_slow_end_of_it(three, monkeypatch):
    """A slow worker reads the answer when another one has gone on, and failed."""
    slow = three[0]
    compared = slow._client.compared

    def compared_later(*given):
        assert slow.loss(20) is not None
        return compared(*given)

    monkeypatch.setattr(slow._client, "compared", compared_later)

    def work(group):
        group.barrier("a step")
        if group.index == 1:
            group.report(ValueError("bad rows"))

    assert everywhere(three, work) == [None] * 3
    loss = slow.loss()
    assert loss is not None and "bad rows" in str(loss)


def test_workers_wait_for_a_file_of_the_chief(three, tmp_path):
    file = tmp_path / "model.keras"

    def save(group):
        for turn in range(3):
            if group.is_chief:
                time.sleep(0.05)
                file.with_suffix(f".{turn}").write_text("")
                group.report_saved(str(file))
            else:
                group.wait_saved(str(file))
            assert file.with_suffix(f".{turn}").exists()
            group.barrier("the next step")

    assert everywhere(three, save) == [None] * 3


def test_a_worker_that_waits_for_a_file_is_told_why_there_is_none(three):
    def fails(group):
        if group.is_chief:
            group.report_saved("a.keras", "OSError: no space left on device")
        else:
            group.wait_saved("a.keras")

    found = everywhere(three, fails)[1]
    assert isinstance(found, WorkerError)
    assert "'a.keras' for all workers: OSError: no space left" in str(found)
    three[0].leave()
    found = everywhere(three[1:], lambda group: group.wait_saved("b.keras"))
    assert all(isinstance(error, WorkerError) for error in found)


WORKER = """
import sys, time
from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.errors import WorkerError
folder, index, *addresses = sys.argv[1:]
group = WorkerGroup.join(addresses, int(index), {}, timeout=3.0)
open(f"{folder}/ready{index}", "w").close()
try:
    for step in range(10**6):
        group.progress = f"step {step} of fit"
        group.barrier("a step")
        time.sleep(0.01)
except WorkerError as error:
    print(error)
    group.leave()
    sys.exit(3)
"""


def start_processes(folder: Path, count: int) -> list[subprocess.Popen[str]]:
    addresses = free_addresses(count)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(index), *addresses],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    wait_until(lambda: len([*folder.glob("ready*")]) == count, "all workers have met")
    time.sleep(0.5)
    return started


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named_by_the_others(tmp_path, victim, fault):
    processes = start_processes(tmp_path, 3)
    try:
        begin = time.monotonic()
        os.kill(processes[victim].pid, fault)
        for index, process in enumerate(processes):
            if index != victim:
                text, _ = process.communicate(timeout=20)
                assert process.returncode == 3
                named = f"Worker {victim} (127.0.0.1, process {processes[victim].pid})"
                assert named in text and "of fit" in text
        # The timeout, three seconds, where nothing tells that it is stopped.
        assert time.monotonic() - begin < (13 if fault is signal.SIGSTOP else 5)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert_gone([process.pid for process in processes])


# --- In a pod -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_kubernetes", "host", "own"),
    [
        (True, "trainer-0.trainer", "10.1.2.3"),
        (True, "trainer-1.trainer", "trainer-1.trainer"),
        (False, "trainer-0.trainer", "trainer-0.trainer"),
        (True, "10.0.0.1", "10.0.0.1"),
    ],
)
def test_a_pod_listens_at_its_own_address(monkeypatch, in_kubernetes, host, own):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    if not in_kubernetes:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    found = {"trainer-0": [(socket.AF_INET, 1, 6, "", ("10.1.2.3", 0))]}
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-0")
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_, **__: found[name])
    assert own_address(host) == own


def test_a_name_that_is_not_in_dns_yet_is_listened_at(monkeypatch):
    [address] = free_addresses(1)
    port = address.partition(":")[2]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    name = socket.gethostname()
    with listen(f"{name}.not-in-dns.invalid", [int(port)]) as server:
        expected = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        assert server.getsockname()[:2] == (expected, int(port))


@pytest.mark.parametrize("leaver", [0, 1], ids=["chief", "worker"])
def test_a_worker_that_ends_its_script_early_is_told_from_one_that_failed(leaver):
    groups = join_all(free_addresses(2))
    other = groups[1 - leaver]
    other.progress = "the beginning of evaluate"
    with ThreadPoolExecutor(1) as pool:
        # As `if task_id == 0: model.evaluate(...)`.
        waiting = pool.submit(other.barrier, "random numbers")
        groups[leaver].leave()
        error = waiting.exception(20)
    assert isinstance(error, WorkerError)
    text = str(error)
    assert f"Worker {leaver} (127.0.0.1, process {os.getpid()}) was lost" in text
    assert "it exited" in text
    assert f"This is worker {1 - leaver}, at the beginning of evaluate." in text
    assert "Every worker has to call `fit`, `evaluate`" in text
    assert "Resume" not in text
    other.leave()


def test_calls_after_the_end_of_the_chiefs_script_say_so():
    chief, other = join_all(free_addresses(2))
    chief.leave()
    wait_until(lambda: other.left is not None, "the chief's end was seen")
    with pytest.raises(WorkerError, match="Every worker has to call"):
        other.barrier("random numbers")
    other.leave()
