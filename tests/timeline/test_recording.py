"""The ring of events: its contents, its costs, and that it outlives its process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from keras_strategies.timeline import recording, ring, runs
from keras_strategies.timeline.recording import DATA, METHOD, SAVE, RingWriter
from keras_strategies.timeline.ring import RECORDS, Ring
from keras_strategies.timeline.watch import SHARES, Report, Row, Watch, awaited_workers
from keras_strategies.tools import cli
from keras_strategies.tools.top_command import as_text

pytestmark = pytest.mark.one_backend
# A process that records, without Keras; FOLDER is that of rings.
CODE = """\
import os, signal, sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from keras_strategies.timeline import recording
recorder = recording.start(worker=3)
step = recording.recorded_step(time.sleep)
with recording.METHOD:
    step(0.01)
    print("ready", flush=True)
    {end}
"""


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(recording, "_now", lambda: int(1e9 * now[0]))
    return now


@pytest.fixture
def own_recorder(clock, monkeypatch):
    found = RingWriter(None)
    monkeypatch.setattr(recording, "_recorder", found)
    yield found
    found.close()


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The folder for the folder of rings."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def shares(recorder, start, end):
    found = recorder.ring.seconds(int(1e9 * start), int(1e9 * end))
    return {name: round(value, 6) for name, value in found.items() if value}


def test_time_is_that_of_the_innermost(own_recorder, clock):
    def step():
        clock[0] += 1.0
        with DATA:
            clock[0] += 2.0
        clock[0] += 1.0
        own_recorder.waiting()
        clock[0] += 4.0
        own_recorder.waited()

    clock[0] += 10.0
    with METHOD:
        recording.recorded_step(step)()
        clock[0] += 0.5
        with SAVE:
            clock[0] += 0.25
            # Under way.
            found = shares(own_recorder, 1000.0, clock[0])
    closed = {"compute": 2.0, "data": 2.0, "wait": 4.0, "save": 0.25}
    # What has not ended is in the method.
    assert found == closed | {"other": 10.5}
    ended = shares(own_recorder, 1000.0, clock[0])
    assert ended == closed | {"outside": 10, "other": 0.5}
    assert shares(own_recorder, 1012.0, 1016.0) == {"data": 1, "compute": 1, "wait": 2}


def test_waits_in_programs_are_taken_from_steps(own_recorder, clock):
    with METHOD:
        for _ in range(4):
            recording.recorded_step(lambda: clock.__setitem__(0, clock[0] + 1.0))()
        own_recorder.waited_inside(4.0, 3.0)
        assert shares(own_recorder, 1000.0, 1004.0) == {"compute": 1.0, "wait": 3.0}


def test_events_of_other_threads_are_no_state_of_this_one(own_recorder, clock):
    def write():
        with SAVE:
            clock[0] += 1.0

    thread = threading.Thread(target=write)
    with METHOD:
        thread.start()
        thread.join()
        [(start, length, kind, other, _)] = own_recorder.ring.records()
        assert (start, length, kind) == (10**12, 10**9, ring.SAVE) and other
        assert shares(own_recorder, 1000.0, 1001.0) == {"other": 1.0}


def test_the_newest_records_are_kept(own_recorder, clock):
    step = recording.recorded_step(lambda: None)
    for _ in range(RECORDS + 10):
        clock[0] += 1.0
        step()
    found = own_recorder.ring.records()
    assert [each[4] for each in found] == list(range(12, RECORDS + 11))
    # What is older than they are is not known, and no time of anything.
    assert sum(shares(own_recorder, 1000.0, clock[0]).values()) < RECORDS


def run(folder, end, code=0):
    command = [sys.executable, "-c", CODE.format(end=end), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    if code == -signal.SIGKILL:
        process.kill()
    assert process.wait(20) == code
    process.stdout.close()
    return process.pid


def test_a_killed_process_leaves_its_last_events(own_folder):
    with_data = "with recording.DATA: time.sleep(60)"
    pid = run(own_folder, with_data, -signal.SIGKILL)
    [found] = runs.processes(str(pid))
    assert (found.pid, found.worker, found.steps) == (pid, 3, 1)
    assert (found.is_alive, found.state) == (False, "data")
    # The time after the last sample is not that of the process.
    text = runs.last_events(pid)
    assert re.search(r"compute \d+\.\d ms \(step 1\), then data for ", text), text
    report = Watch(str(pid)).look()
    assert "its process has ended" in str(report.findings[0])
    assert "has ended" in as_text(report)
    # No process of any run trains.
    assert cli.main(["top", "--once"]) == 1


def test_a_process_that_has_ended_leaves_nothing_but_a_failed_one_does(own_folder):
    run(own_folder, "pass")
    assert runs.rings() == []
    pid = run(own_folder, "raise SystemError('my bug')", 1)
    assert [each.pid for each in runs.processes(str(pid))] == [pid]
    [path] = ring.folder().glob("*.ring")
    os.utime(path, (1, 1))
    recording._remove_old(ring.folder())
    assert runs.rings() == []


def test_a_forked_process_does_not_write_to_the_ring(own_recorder):
    before = bytes(own_recorder.ring.words)
    pid = os.fork()
    if not pid:
        recording.recorded_step(lambda: None)()
        os._exit(0 if recording.recorder() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    sampled = slice(8 * ring.SAMPLED, 8 * (ring.SAMPLED_KIND + 1))
    after = bytearray(own_recorder.ring.words)
    after[sampled] = before[sampled]
    # The place of this process may have been written meanwhile.
    assert Ring.of(bytes(after)).records() == Ring.of(before).records()


def test_a_folder_of_another_user_is_refused_with_a_warning(own_folder):
    folder = own_folder / f"keras-strategies-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="other users may write to .*Set TMPDIR"):
        assert recording._new_file() is None


def test_what_is_no_ring_is_left_out(own_folder):
    (ring.folder() / "1-1.ring").write_bytes(b"x")
    (ring.folder() / "1-2.ring").write_bytes(bytes(8 * (512 + 3 * RECORDS)))
    assert runs.rings() == []
    with pytest.raises(ValueError, match="no ring"):
        Ring.of(b"")


def test_a_step_costs_microseconds(monkeypatch):
    found = RingWriter(None)
    monkeypatch.setattr(recording, "_recorder", found)
    step = recording.recorded_step(lambda: None)
    begin = time.process_time()
    for _ in range(1000):
        step()
        with DATA:
            pass
        found.waiting()
        found.waited()
        recording.count_rows(([b""], 0))
    # About 5 microseconds each; a busy machine takes longer.
    assert time.process_time() - begin < 0.05
    assert len(found.ring.records()) == 3000
    found.close()


def test_the_trace_is_of_chrome(own_recorder, clock):
    own_recorder.describe(worker=1, host="a", pid=7)
    recording.recorded_step(lambda: clock.__setitem__(0, clock[0] + 0.5))()
    found = json.loads(json.dumps(runs.trace([(own_recorder.ring, 5_000)])))
    name, event = found["traceEvents"]
    assert name["args"] == {"name": "worker 1 (a, process 7)"}
    assert event["ts"] == 1e9 + 5 and event["dur"] == 500_000
    assert (event["ph"], event["name"], event["pid"]) == ("X", "step 1", 1)


def test_a_run_says_which_of_its_processes_are_not_seen(tmp_path, monkeypatch, clock):
    """Two of three workers are on this machine; both wait for the third."""
    monkeypatch.setattr(ring, "folder", lambda: tmp_path)
    others = "Others are on 10.0.0.7."
    writers = [RingWriter(tmp_path / f"{i}-{os.getpid()}.ring") for i in range(2)]
    for worker, found in enumerate(writers):
        # One process has both rings.
        found.describe(pid=os.getpid(), run="a1", worker=worker, script="train.py")
        found.describe(processes=3, others=others)
        found.waiting()
    try:
        [state, _] = runs.processes("a1")
        states = [replace(state, worker=i, seconds=5.0) for i in range(2)]
        given = dict.fromkeys(SHARES, 0.0)
        rows = tuple(Row(each, 0, 0, 0, given, 0) for each in states)
        report = Report(rows, (), ())
        assert report.others == (
            "2 of 3 processes of the run are shown. They have waited for 5 s for one "
            f"that is not. {others}"
        )
        assert as_text(report).splitlines()[-1] == report.others
        # No worker here is blamed, although a thread of worker 0 is busy.
        busy = (replace(rows[0], processor=1.0), rows[1])
        assert awaited_workers(busy) == ()
        seen = replace(report, rows=(*rows, rows[0]))
        assert seen.others == ""
    finally:
        for found in writers:
            found.close()
