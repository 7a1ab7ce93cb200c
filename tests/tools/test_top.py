"""`keras-strategies top` names the worker that the others wait for, why, and where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import keras
import pytest
from harness.forker import Forked, Forker
from harness.hosts import Hosts, connected_hosts
from harness.processes import TIMEOUT, command, wait_until

from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.timeline import runs
from keras_strategies.timeline.watch import Watch
from keras_strategies.tools import top_command

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc"),
]
SCRIPT = str(Path(__file__).with_name("stalled_training.py"))
# Within these seconds a stall is named.
NAMED = 10.0
STALLS = {
    # What is planted: the worker, what it does, how, and whether a line of it is known.
    "loader": (1, "data", "idle", True),
    # Keras looks at the first batch of a generator before its loop.
    "first_batch": (1, "other", "idle", True),
    "pipe": (1, "data", "idle", True),
    "socket": (1, "data", "idle", True),
    "queue": (1, "data", "idle", True),
    "busy_loader": (1, "data", "busy", True),
    # It holds the interpreter: nothing in its process can say the line.
    "pattern": (1, "data", "native", False),
    "lock": (1, "other", "idle", True),
    "file_lock": (1, "other", "idle", True),
    "thread": (1, "other", "idle", True),
    "program": (1, "other", "idle", True),
    "busy_callback": (1, "other", "busy", True),
    "epoch": (1, "other", "idle", True),
    "gc": (1, "gc", "idle", True),
    "save": (0, "save", "idle", True),
    "outside": (1, "outside", "idle", True),
    "late_chief": (0, "outside", "idle", True),
    "left": (1, "outside", "idle", True),
    "stop": (1, "other", "stopped", False),
    "stop_chief": (0, "other", "stopped", False),
    "delay": (1, "data", None, True),
    "delay_callback": (1, "other", None, True),
}


class Training:
    """Two workers of `stalled_training`.

    With `hosts`, each is on a host with files of its own.
    """

    def __init__(
        self, forker: Forker, folder: Path, kind: str, hosts: Hosts | None = None
    ):
        self._stalled = folder / "stalled"
        self._folders = [folder, folder]
        addresses = free_addresses(2)
        if hosts is not None:
            self._folders = [folder / address for address in hosts.addresses]
            addresses = [f"{address}:4711" for address in hosts.addresses]
        self.workers: list[Forked] = []
        for index, own in enumerate(self._folders):
            script = SCRIPT if hosts is None else on_host(hosts, index, own)
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": addresses}, "task": task})
            given = (own / f"log{index}", script, kind, str(folder))
            self.workers.append(forker.start(*given, TF_CONFIG=config))
        wait_until(lambda: self._stalled.exists() or self._ended(), "a worker stalls")
        assert not self._ended(), "\n".join(each.text() for each in self.workers)

    def _ended(self) -> bool:
        return any(each.ended() is not None for each in self.workers)

    def top(self, host: int) -> str:
        """What `keras-strategies top --once` prints on a host."""
        return subprocess.run(
            command("top", "--once"),
            env={**os.environ, "TMPDIR": str(self._folders[host])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def on_host(hosts: Hosts, index: int, folder: Path) -> str:
    """A script that enters a host, with temporary files in a folder of its own."""
    folder.mkdir()
    script = folder / "on_host.py"
    script.write_text(
        f"import runpy, tempfile; tempfile.tempdir = {str(folder)!r}\n"
        f"{hosts.enter(index)}\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    )
    return str(script)


@pytest.fixture
def forker():
    with Forker() as found:
        yield found


def line_of(kind: str) -> str:
    """The line of the script that stalls."""
    lines = enumerate(Path(SCRIPT).read_text().splitlines(), 1)
    [number] = [i for i, line in lines if line.endswith(f"# stalls {kind}")]
    return f"{SCRIPT}, line {number}, in "


def first_finding(watch: Watch):
    """The first finding of a run, and its report."""
    until = time.monotonic() + NAMED
    while time.monotonic() < until:
        report = watch.look()
        if report.findings:
            return report.findings[0], report
        time.sleep(0.5)
    raise AssertionError(top_command.as_text(report))


@pytest.mark.nightly(unless=["lock"])
@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("kind", STALLS)
def test_a_stall_is_named_with_worker_cause_and_line(forker, tmp_path, kind):
    worker, state, how, has_line = STALLS[kind]
    training = Training(forker, tmp_path, kind)
    pid = training.workers[worker].pid
    if kind in ("stop", "stop_chief"):
        os.kill(pid, signal.SIGSTOP)
    found, report = first_finding(Watch(str(training.workers[0].pid)))
    text = top_command.as_text(report)
    assert (found.worker, found.pid) == (worker, pid), text
    # On TensorFlow a thread that reads ahead holds the interpreter, perhaps in a step.
    is_ahead = kind == "pattern" and keras.backend.backend() == "tensorflow"
    assert found.state == state or (is_ahead and found.state == "compute"), text
    assert how in (None, found.how), text
    if has_line:
        assert line_of(kind) in found.place, text
        assert f"Worker {worker} (process {pid})" in text and line_of(kind) in text
        assert f", {Path(SCRIPT).name}:" in text or "delay" in kind
    if "delay" not in kind:
        assert report.awaited == (worker,)
        assert f"for {worker}" in text


@pytest.mark.nightly
def test_batches_of_unequal_shapes_are_an_error_that_names_the_worker(forker, tmp_path):
    training = Training(forker, tmp_path, "shapes")
    until = time.monotonic() + NAMED
    for each in training.workers:
        code, _ = each.wait(max(0.1, until - time.monotonic()))
        text = each.text()
        [error] = re.findall(r"^keras_strategies\.errors\.WorkerError: .*$", text, re.M)
        assert code == 1 and "different batches at step 21 of fit" in error
        shapes = r"worker 1 has (shapes )?\[\[12, 8\], \[12, 1\]\]"
        assert re.search(shapes, error), error
        # It is said alone, not as the reason of a loss that nobody knows.
        assert "none is known to be lost" not in error


@pytest.mark.slow(seconds=20)
@pytest.mark.nightly
def test_an_error_has_the_last_events_of_a_killed_worker(forker, tmp_path):
    training = Training(forker, tmp_path, "loader")
    other, killed = training.workers
    time.sleep(1.0)
    killed.send_kill()
    other.wait(TIMEOUT)
    # TensorFlow's own error has it, too.
    error, *_ = [x for x in other.text().splitlines() if "Its last events:" in x]
    # Where batches are read ahead, in the step before.
    lost = re.search(rf"process {killed.pid}\) was lost at step (19|20|21) of", error)
    assert lost and "compute" in error and re.search(r"\(step (19|20)\)", error)
    assert "then data for 1." in error and line_of("loader") in error
    # The ring is there for `top`.
    [found] = [each for each in runs.processes(f"{killed.pid}") if each.worker == 1]
    assert not found.is_alive and found.state == "data" and found.steps in (20, 21)


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("kind", ["loader", "lock"])
def test_top_on_each_of_two_hosts_leads_to_the_line_that_stalls(
    forker, tmp_path, kind
) -> None:
    with connected_hosts(2) as hosts:
        training = Training(forker, tmp_path, kind, hosts)
        time.sleep(3.0)
        waiting, stalled = training.top(0), training.top(1)
        for each in training.workers:
            each.kill()
    # The host of the worker that waits names the other one, and no worker here.
    _, row, *notes = re.findall(r"^(?:worker|\d).*$|^\S.*\.$", waiting, re.M)
    pids = [each.pid for each in training.workers]
    # Only Torch sees waits in the middle of a step; callbacks read its values on JAX.
    is_seen = kind == "lock" or keras.backend.backend() == "torch"
    state = "wait" if is_seen else "(compute|other)"
    assert re.match(rf"0 +{pids[0]} .* {state} \d+\.\d s, ", row), waiting
    [note] = notes
    since = r"They have waited for \d+ s for one that is not\. " if is_seen else ""
    assert re.match(
        rf"1 of 2 processes of the run are shown\. {since}Others are on "
        rf"{hosts.addresses[1]}: `keras-strategies top`",
        note,
    )
    state = STALLS[kind][1]
    assert re.search(rf"^1 +{pids[1]} .* {state} \d+\.\d s, ", stalled, re.M), stalled
    place = line_of(kind).partition(", in ")[0].rpartition("/")[2]
    assert place.replace(", line ", ":") in stalled, stalled
    others = f"Others are on {hosts.addresses[0]}"
    assert f"1 of 2 processes of the run are shown. {others}" in stalled, stalled
