"""Workers meet, agree, and hear of one another's end: real sockets, real processes."""

from __future__ import annotations

import json
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
from keras_strategies.cluster.group.group_messages import MessageConnection
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.group.hub_connection import listen
from keras_strategies.cluster.own_address import own_address
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.errors import ClusterError, WorkerError

SAME = {"backend": "none"}


def join_all(count, timeout=10.0, indices=None, same=None):
    addresses = free_addresses(count)
    indices = range(count) if indices is None else indices
    with ThreadPoolExecutor(count) as pool:
        futures = [
            pool.submit(
                WorkerGroup.join,
                addresses,
                index,
                same[i] if same else SAME,
                {"name": f"w{i}"},
                timeout,
            )
            for i, index in enumerate(indices)
        ]
        return [future.exception(60) or future.result() for future in futures]


def test_a_receiver_that_reads_nothing_does_not_delay_the_sender():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = MessageConnection(socket.create_connection(server.getsockname()))
        receiver = MessageConnection(server.accept()[0])
    # More than the buffers of a connection take, in small messages and large ones.
    sizes = [10, 5000, 2_000_000] * 20 + [10]
    begin = time.monotonic()
    for number, size in enumerate(sizes):
        sender.send({"number": number}, b"x" * size)
    assert time.monotonic() - begin < 5
    found = [receiver.receive(timeout=10) for _ in sizes]
    assert [header["number"] for header, _ in found] == list(range(len(sizes)))
    assert [len(payload) for _, payload in found] == sizes
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive(timeout=10)
    receiver.close()


def test_a_handler_of_a_signal_may_send_while_it_interrupts_a_message(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = MessageConnection(socket.create_connection(server.getsockname()))
        receiver = MessageConnection(server.accept()[0])
    send_bytes = sender._connection.send_bytes

    def interrupted(message):
        monkeypatch.setattr(sender._connection, "send_bytes", send_bytes)
        sender.send({"number": 1})
        send_bytes(message)

    monkeypatch.setattr(sender._connection, "send_bytes", interrupted)
    thread = threading.Thread(target=sender.send, args=[{"number": 0}], daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    sender.send({"number": 2})
    found = [receiver.receive(timeout=10)[0]["number"] for _ in range(3)]
    assert found == [0, 1, 2]
    sender.close()
    receiver.close()


def test_an_exchange_of_small_messages_needs_no_thread_that_sends():
    before = set(threading.enumerate())
    groups = join_all(3)
    try:
        with ThreadPoolExecutor(3) as pool:
            for _ in range(5):
                list(pool.map(lambda group: group.gather_values("x", 1), groups))
        started = set(threading.enumerate()) - before
        assert "group-sender" not in {thread.name for thread in started}
    finally:
        for group in reversed(groups):
            group.leave()


def test_a_probe_of_the_port_leaves_nothing_behind():
    # As a readiness probe: a connection that says nothing.
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        hub = Hub(server, "job", [f"127.0.0.1:{address[1]}"] * 2, timeout=60.0)
        kept = len(set(threading.enumerate()) - before)
        for _ in range(3):
            socket.create_connection(address).close()
        with socket.create_connection(address) as asked:
            # Connections are accepted in turn.
            asked.sendall(b"\0\0\0\2{}")
            asked.settimeout(60)
            assert asked.recv(1) == b""
        wait_until(
            lambda: len(set(threading.enumerate()) - before) == kept,
            "the connections' threads have ended",
        )
        hub.close()


def everywhere(groups, call):
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(call, group) for group in groups]
        return [future.exception(60) or future.result() for future in futures]


@pytest.fixture
def three():
    groups = join_all(3)
    yield groups
    everywhere(groups, WorkerGroup.leave)


def test_workers_learn_of_one_another(three):
    for index, group in enumerate(three):
        assert (group.index, group.count) == (index, 3)
        assert [member["name"] for member in group.members] == ["w0", "w1", "w2"]
        assert group.own_host == "127.0.0.1"


def test_the_chief_prints_a_line_for_each_worker_that_comes(capsys):
    groups = join_all(2)
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
        found = everywhere(
            three,
            lambda group, turn=turn: group.gather_values("x", [group.index, turn]),
        )
        assert found == [[[0, turn], [1, turn], [2, turn]]] * 3


def test_large_payloads_arrive_whole(three):
    found = everywhere(three, lambda g: g.gather("x", bytes([g.index]) * 5_000_000))
    assert all(len(part) == 5_000_000 for parts in found for part in parts)
    assert [part[0] for part in found[1]] == [0, 1, 2]


@pytest.fixture
def sent(monkeypatch):
    """Lengths of messages by kind and connection, while they are sent."""
    lengths: dict[str, dict[int, list[int]]] = {}
    send = MessageConnection.send_encoded

    def counted(self, message):
        kind = json.loads(message.partition(b"\n")[0])["kind"]
        of_kind = lengths.setdefault(kind, {})
        of_kind.setdefault(id(self), []).append(len(message))
        send(self, message)

    monkeypatch.setattr(MessageConnection, "send_encoded", counted)
    return lengths


@pytest.mark.parametrize("ours", [lambda g: 7, lambda g: 7 if g.is_chief else 8])
def test_the_answer_of_equal_values_does_not_grow_with_the_workers(sent, ours):
    longest = []
    for count in (2, 4, 8, 32):
        groups = join_all(count, timeout=60)
        sent.clear()
        found = everywhere(groups, lambda g: g.gather_values("a batch", ours(g)))
        assert found == [[ours(group) for group in groups]] * count
        answers = sent["gathered"].values()
        assert len(answers) == count
        longest.append(max(sum(each) for each in answers))
        everywhere(groups, WorkerGroup.leave)
    # The number of workers has one digit more.
    assert max(longest) <= min(longest) + 2


def test_beats_do_not_grow_with_the_workers_and_bring_the_times_of_all(sent):
    groups = join_all(40, timeout=60)
    for group in groups:
        group.clock.begin()
        time.sleep(0.001)
        group.clock.end()
    sent.clear()
    wait_until(
        lambda: all(each.steps for group in groups for each in group.times),
        "every worker knows the times of all",
    )
    lengths = [length for each in sent["beat"].values() for length in each]
    everywhere(groups, WorkerGroup.leave)
    # 16 workers' times, of less than 60 bytes each.
    assert max(lengths) < 16 * 60 + 100


def test_the_chief_broadcasts(three):
    found = everywhere(three, lambda g: g.broadcast("x", bytes([g.index])))
    assert found == [b"\0"] * 3


def test_agreement_says_who_has_what(three):
    everywhere(three, lambda g: g.agree("the batch size", 32))
    found = everywhere(three, lambda g: g.agree("the batch size", 32 + (g.index == 2)))
    assert all(isinstance(error, ClusterError) for error in found)
    assert "worker 2 has 33" in str(found[0])


def test_workers_that_do_different_things_are_told(three):
    found = everywhere(three, lambda g: g.gather("a" if g.index else "b", b""))
    assert all(isinstance(error, WorkerError) for error in found)
    assert "'b'" in str(found[1])
    assert "All workers must make the same calls" in str(found[1])


def test_one_worker_that_never_comes_is_named():
    start = time.monotonic()
    found = join_all(3, timeout=1.0, indices=[0, 2])
    assert all(isinstance(error, WorkerError) for error in found)
    assert all("worker 1 (127.0.0.1:" in str(error) for error in found)
    assert "timeout_seconds" in str(found[0])
    assert time.monotonic() - start < 8


def test_a_chief_that_never_comes_is_named():
    found = join_all(2, timeout=1.0, indices=[1])
    assert isinstance(found[0], WorkerError)
    assert "Worker 1 could not reach the chief at 127.0.0.1:" in str(found[0])


def test_two_workers_with_one_index_are_refused():
    found = join_all(3, indices=[0, 1, 1])
    assert all(isinstance(error, ClusterError) for error in found)
    assert all("Two processes connected as worker 1" in str(e) for e in found)


def test_workers_that_differ_are_refused():
    same = [{"backend": "jax"}, {"backend": "torch"}]
    found = join_all(2, same=same)
    assert all(isinstance(error, ClusterError) for error in found)
    assert "disagree on backend" in str(found[0])
    assert "'jax'" in str(found[0]) and "'torch'" in str(found[0])


def test_a_port_in_use_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="another program listens there"):
            WorkerGroup.join([address, "127.0.0.1:1"], 0, SAME, timeout=30)


def test_an_address_of_another_machine_is_an_error_at_once():
    # From a block that is set aside for documentation.
    with pytest.raises(ClusterError, match="must be an address of this"):
        WorkerGroup.join(["192.0.2.1:4711", "127.0.0.1:1"], 0, SAME, timeout=30)


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

        def join(index):
            return WorkerGroup.join(
                [first, "rank-1"], index, SAME, timeout=10, shares_port=True
            )

        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(join, range(2)))
        assert everywhere(groups, lambda g: g.gather_values("x", g.index)) == [
            [0, 1],
            [0, 1],
        ]
        everywhere(groups, WorkerGroup.leave)


def test_a_worker_that_leaves_ends_the_wait_of_others(three):
    three[2].leave()
    found = everywhere(three[:2], lambda g: g.barrier("the end of the epoch"))
    assert all(isinstance(error, WorkerError) for error in found)
    assert "Worker 2" in str(found[0])
    assert "'the end of the epoch'" in str(found[0])


def test_a_failure_is_told_to_the_others(three):
    three[1].progress = "step 7 of fit"
    three[1].report(ValueError("bad\nrows"))
    for index in (0, 2):
        loss = three[index].loss(wait=10)
        assert loss is not None and loss.index == 1
        assert "step 7 of fit: ValueError: bad." in str(loss)
    assert three[1].loss() is None


def test_a_failure_after_a_gather_outlasts_a_slow_end_of_it(three, monkeypatch):
    """A slow worker reads the answer when another one has gone on, and failed."""
    slow, check = three[0], three[0].check

    def check_later() -> None:
        # It releases the lock for the thread that receives messages.
        assert slow._condition.wait_for(lambda: slow._failure is not None, 20)
        check()

    monkeypatch.setattr(slow, "check", check_later)

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


def test_workers_stop_after_the_same_step(three):
    """Steps that all take part in, of which one worker begins the next ahead."""
    barrier = threading.Barrier(3)
    asked = threading.Event()

    def work(group):
        steps = 0
        while group.begin_step():
            # As in training: nobody ends a step before all have begun it.
            barrier.wait(20)
            steps += 1
            time.sleep(0.002 * group.index)
            if steps == 25 and group.index == 1:
                group.request_stop()
                asked.set()
        return steps

    found = everywhere(three, work)
    assert asked.is_set()
    assert len(set(found)) == 1, found
    assert 25 <= found[0] < 200
    everywhere(three, WorkerGroup.resume)
    assert everywhere(three, WorkerGroup.begin_step) == [True] * 3


WORKER = """
import sys, time
from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.cluster.group.group_messages import MessageConnection
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.group.hub_connection import listen
from keras_strategies.cluster.own_address import own_address
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
    wait_until(
        lambda: len(list(folder.glob("ready*"))) == count, "all workers have met"
    )
    time.sleep(0.5)
    return started


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named_by_the_others(tmp_path, victim, fault):
    processes = start_processes(tmp_path, 3)
    try:
        begin = time.monotonic()
        os.kill(processes[victim].pid, fault)
        for index, process in enumerate(processes):
            if index == victim:
                continue
            text, _ = process.communicate(timeout=20)
            assert process.returncode == 3
            assert (
                f"Worker {victim} (127.0.0.1, process {processes[victim].pid})" in text
            )
            assert "of fit" in text
        # The timeout, three seconds, where nothing tells that it is stopped.
        assert time.monotonic() - begin < (13 if fault is signal.SIGSTOP else 5)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert_gone([process.pid for process in processes])


def test_the_loss_of_a_worker_says_how_long_its_steps_took(three):
    for group in three:
        assert group.lateness(2) == ""
        group.clock.begin(3)
        group.clock.end()
    wait_until(
        lambda: bool(three[0].times) and min(t.steps for t in three[0].times) == 3,
        "the chief has the times of all",
    )
    three[2].abandon()
    wait_until(lambda: three[0].loss() is not None, "the loss is seen")
    with pytest.raises(WorkerError, match="Its last steps took 0 ms each without"):
        three[0].check()


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
    groups = join_all(2)
    other = groups[1 - leaver]
    other.progress = "the beginning of evaluate"
    with ThreadPoolExecutor(1) as pool:
        # As `if task_id == 0: model.evaluate(...)`.
        waiting = pool.submit(other.gather, "random numbers", b"")
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
    chief, other = join_all(2)
    chief.leave()
    wait_until(lambda: other.loss() is not None, "the chief's end was seen")
    with pytest.raises(WorkerError, match="Every worker has to call"):
        other.gather("random numbers", b"")
    other.leave()
