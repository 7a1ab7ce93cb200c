"""Peers without the secret, and a lead without free descriptors."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import struct
import subprocess
import threading
import time

import pytest
from harness.processes import wait_until
from lead.leads import SECRET, RunningLead, lead_process, together
from lead.leads import compare as compare_values

from keras_strategies.errors import WorkerError
from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.peers import PENDING, RareWarnings
from keras_strategies.lead.process import tls_context

pytestmark = pytest.mark.one_backend


@pytest.fixture
def lead(tmp_path):
    """A lead with two workers that compare values all the time, and its log."""
    with open(tmp_path / "log", "w") as log, RunningLead(2, stderr=log) as running:
        running.log, running.counts = tmp_path / "log", [0, 0]
        with comparing(running, running.counts):
            yield running


@contextlib.contextmanager
def comparing(running, counts):
    two, ended = running.training(2), threading.Event()

    def compare(client):
        def ends():
            answer = compare_values(client, "whether to end", str(ended.is_set()))
            return [value for value, _ in answer] == ["True"]

        while not ends():
            counts[client.index] += 1
            time.sleep(0.005)

    threads = [threading.Thread(target=compare, args=[each]) for each in two]
    for each in threads:
        each.start()
    yield
    ended.set()
    for each in threads:
        each.join(20)
        assert not each.is_alive()


@pytest.fixture
def errors(capfd):
    """A function of what was written to the errors of this process until now."""
    shown: list[str] = []

    def peek():
        shown.append(capfd.readouterr().err)
        return "".join(shown)

    return peek


def goes_on(running):
    before = list(running.counts)
    wait_until(lambda: min(running.counts) > max(before) + 5, "the workers go on")


def connect(running, seconds=5.0):
    return socket.create_connection(running.address, seconds)


def ends(connected):
    """Whether the lead closes a connection."""
    connected.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while connected.recv(4096):
            pass
    connected.close()
    return True


def test_a_peer_without_the_secret_makes_the_lead_hold_nothing(lead):
    before, sent = lead.megabytes, 0
    with connect(lead) as flood, contextlib.suppress(OSError):
        for _ in range(200):
            flood.sendall(bytes(1 << 20))
            sent += 1
    assert sent < 20
    assert lead.megabytes < before + 4
    goes_on(lead)


def test_half_open_connections_hold_neither_threads_nor_descriptors(lead):
    before = lead.descriptors
    opened = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            each = connect(lead, 1)
            each.sendall(b"\0\0")
            opened.append(each)
    assert len(opened) > PENDING
    assert lead.threads == 1
    assert lead.descriptors <= before + PENDING + 2
    goes_on(lead)
    for each in opened:
        each.close()
    wait_until(lambda: lead.descriptors == before, "the descriptors are free again")


@pytest.mark.slow(seconds=6)
def test_a_peer_has_five_seconds_for_its_proof(lead):
    begun = time.monotonic()
    assert ends(connect(lead))
    assert 4 < time.monotonic() - begun < 15


GARBAGE = {
    "http": b"GET / HTTP/1.0\r\n\r\n" * 8,
    "random": os.urandom(4096),
    "length": struct.pack("!Q", 1 << 62) * 20,
    "json": b"[" * 100_000,
    "pickle": pickle.dumps(os.getcwd) * 20,
}


def test_garbage_ends_its_connection_with_one_line_a_minute(lead, errors):
    for data in [*GARBAGE.values()] * 6:
        with connect(lead) as peer, contextlib.suppress(OSError):
            peer.sendall(data)
            assert ends(peer)
    goes_on(lead)
    # The chief, a client of this process, shows the lines of the lead.
    wait_until(lambda: "keras_strategies: The lead" in errors(), "a line")
    lines = errors().splitlines()
    assert len([line for line in lines if "The lead: " in line]) == 1, lines
    assert "sends no messages" in lines[0] and "secret" in lines[0]
    assert lead.log.read_text() == ""
    assert lead.threads == 1


def test_a_worker_connects_while_others_flood_the_port(lead):
    ended = threading.Event()

    def flood():
        held = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(connect(lead, 0.5))
            if len(held) > 200:
                held.pop(0).close()
        for each in held:
            each.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.3)
        assert lead.client(1).is_running
    finally:
        ended.set()
        thread.join()
    goes_on(lead)


def test_accepting_pauses_without_descriptors_and_goes_on(lead, errors):
    pid = lead.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    waiting = connect(lead)
    wait_until(lambda: "accepting pauses: Too many open files" in errors(), "a line")
    goes_on(lead)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    waiting.close()
    assert lead.client(1).is_running
    goes_on(lead)


START = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from keras_strategies.lead.process import start_lead
from keras_strategies.lead.state import Settings
listener = socket.create_server(("127.0.0.1", 0))
lead = start_lead(listener, Settings({workers}))
"""


def test_the_soft_limit_of_descriptors_is_raised():
    code = START.format(soft=64, hard=512, workers=40) + (
        "import time\n"
        "for _ in range(400):\n"
        "    soft = resource.prlimit(lead.pid, resource.RLIMIT_NOFILE)[0]\n"
        "    if soft > 64: break\n"
        "    time.sleep(0.05)\n"
        "print(soft)\n"
        "lead.kill()\n"
    )
    assert int(lead_process(code).stdout) >= 40 + PENDING


def test_a_hard_limit_of_descriptors_is_named():
    found = lead_process(START.format(soft=100, hard=100, workers=400))
    assert found.returncode != 0
    text = found.stderr.replace("\n", " ")
    assert "400 workers need 496 open files in the lead, but the limit of" in text
    assert "this machine is 100" in text


def test_warnings_are_counted():
    shown: list[str] = []
    warnings = RareWarnings(shown.append)
    for _ in range(3):
        warnings.warn("a")
    warnings._next = 0.0
    warnings.warn("b")
    assert shown == ["The lead: a", "The lead: b (2 more since the last line)"]


def test_connections_can_be_encrypted(tmp_path, monkeypatch):
    path = tmp_path / "lead.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=lead"
    subprocess.run(
        [*command.split(), "-keyout", str(path), "-out", f"{path}.crt"],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (tmp_path / "lead.pem.crt").read_text())
    monkeypatch.setenv("KS_CLUSTER_CERT", str(path))
    with RunningLead(2) as lead:
        two = lead.training(2, tls=tls_context(is_server=False))
        found = together(
            two, lambda c: compare_values(c, "x", f"{c.index}" * 3_000_000)
        )
        assert [len(v) for values in found for v, _ in values] == [3_000_000] * 4
        with pytest.raises(WorkerError):
            LeadClient([lead.address], SECRET, 0, timeout=0.5)
        assert lead.threads == 1
