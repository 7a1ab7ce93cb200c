"""Workers and their lead in a process of its own, over real sockets."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from lead.leads import SECRET, Proxy, RunningLead, begin, compare, together

from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.client_state import GroupChanged, TrainingEnded
from keras_strategies.lead.connection import LeadConnection
from keras_strategies.lead.events import TICK
from keras_strategies.lead.process import UNFINISHED
from keras_strategies.lead.state import Settings

pytestmark = pytest.mark.one_backend


@pytest.fixture
def lead():
    with RunningLead(3) as running:
        yield running


def exchange(client, turn=0):
    return compare(client, f"turn {turn}", f"{client.index}-{turn}")


def test_workers_compare_values_with_one_thread_each(lead):
    before = threading.active_count()
    three = lead.training(3)
    assert threading.active_count() == before + 3 and lead.threads == 1
    for turn in range(50):
        expected = [(f"{i}-{turn}", (i,)) for i in range(3)]
        for found in together(three, lambda client, turn=turn: exchange(client, turn)):
            assert sorted(found) == expected
    found = together(three, lambda client: compare(client, "all", "same"))
    assert found == [[("same", (0, 1, 2))]] * 3


def test_a_thread_sends_its_messages_itself(lead, monkeypatch):
    """To wake the thread of the connection would take as long as a comparison."""
    three, woken = lead.training(3), []
    monkeypatch.setattr(LeadConnection, "_wake", woken.append)
    for turn in range(20):
        found = together(three, lambda client, turn=turn: exchange(client, turn))
        assert [len(values) for values in found] == [3, 3, 3]
    assert not woken


def test_an_answer_that_nobody_reads_is_not_kept(lead):
    """Such as that of a batch which was read ahead when training ended."""
    three = lead.training(3)
    for each in three:
        for turn in range(20):
            each.offer(f"turn {turn}", "")
    together(three, lambda client: compare(client, "all"))
    assert [len(client._offered) for client in three] == [0, 0, 0]


def test_a_lost_worker_ends_waits_and_the_others_continue(lead):
    three = lead.training(3)
    three[1].progress = "step 7 of fit"
    time.sleep(2 * TICK)
    others = [three[0], three[2]]
    three[1].abandon()
    found = together(others, exchange)
    assert all(isinstance(error, GroupChanged) for error in found)
    assert "Worker 1 (127.0.0.1, process " in str(found[0])
    assert "was lost at step 7 of fit" in str(found[0])
    assert (found[0].loss.worker, found[0].loss.rank) == (1, 1)
    together(others, lambda client: begin(client, 5 + client.index))
    generation = three[0].generation
    assert (generation.members, generation.step, generation.behind) == ((2, 0), 7, (1,))
    assert generation.lost == (1,)


def test_a_new_worker_joins_after_a_common_step(lead):
    three = lead.training(3)
    three.pop().abandon()
    together(three, lambda client: begin(client, 0))
    joined = threading.Thread(target=lambda: begin(lead.client(2)), daemon=True)
    joined.start()

    def train(client):
        step = 0
        while client.begin_step():
            compare(client, f"step {step}")
            step += 1
            client.step = step
        begin(client, step)
        return step

    steps = together(three, train)
    joined.join(20)
    assert len(set(steps)) == 1 and three[0].generation.joined == (2,)
    assert lead.clients[-1].is_running


@pytest.fixture
def proxy(lead):
    with contextlib.closing(Proxy(lead.address)) as made:
        yield made


@pytest.fixture
def three(lead, proxy):
    """Workers that train, of which worker 1 is behind the proxy."""
    ends = (lead, proxy, lead)
    made = together(range(3), lambda i: lead.client(i, address=ends[i].address))
    return together(made, begin)


def test_a_cut_connection_is_continued_without_a_loss_of_messages():
    with (
        RunningLead(3, grace=20.0, timeout=20.0) as lead,
        contextlib.closing(Proxy(lead.address)) as proxy,
    ):
        three = lead.training(3, address=proxy.address)
        number = three[0].generation.number
        ended = threading.Event()

        def cut():
            while not ended.wait(0.15):
                proxy.cut()

        cutter = threading.Thread(target=cut, daemon=True)
        cutter.start()
        try:
            for turn in range(60):
                expected = [(f"{i}-{turn}", (i,)) for i in range(3)]
                for found in together(three, lambda c, turn=turn: exchange(c, turn)):
                    assert not isinstance(found, Exception), found
                    assert sorted(found) == expected
        finally:
            ended.set()
            cutter.join()
        assert [client.generation.number for client in three] == [number] * 3


def test_a_worker_that_was_cut_off_hears_that_its_generation_has_ended(proxy, three):
    proxy.cut(refuses=True)
    cut_at = time.monotonic()
    assert all(isinstance(e, GroupChanged) for e in together(three, exchange))
    # Not at once, as it may be continued, and long before `timeout`, 3 s.
    assert Settings(3).grace == 0.2 <= time.monotonic() - cut_at < 1.5
    others = [three[0], three[2]]
    together(others, lambda client: begin(client, 3))
    proxy.mend()
    waiting = threading.Thread(target=lambda: begin(three[1], 1), daemon=True)
    waiting.start()

    def train(client):
        while client.begin_step():
            compare(client, "a step")
        begin(client, 4)

    together(others, train)
    waiting.join(20)
    # Its state was kept until it has received the newer one.
    assert three[1].generation.is_behind and three[1].generation.step == 4


def test_a_silent_network_ends_the_lease_before_others_continue(proxy, three):
    proxy.silence()
    at = {}

    def begin_steps():
        try:
            while True:
                assert three[1].begin_step()
                at["last step"] = time.monotonic()
                time.sleep(0.01)
        except GroupChanged:
            pass

    stepping = threading.Thread(target=begin_steps, daemon=True)
    stepping.start()
    others = [three[0], three[2]]
    assert all(isinstance(e, GroupChanged) for e in together(others, exchange))
    together(others, lambda client: begin(client, 3))
    begun = time.monotonic()
    proxy.mend()
    stepping.join(20)
    assert at["last step"] < begun


def test_workers_stop_after_a_common_step_and_go_on():
    with RunningLead(3, is_fixed=True) as lead:
        three = lead.training(3)

        def train(client):
            steps = 0
            while client.begin_step():
                compare(client, "a step")
                steps += 1
                if steps == 5 and client.index == 1:
                    client.request_stop()
            client.resume_steps()
            return steps

        found = together(three, train)
        assert len(set(found)) == 1 and 5 <= found[0] < 200, found
        assert together(three, LeadClient.begin_step) == [True] * 3


def test_a_lead_that_has_ended_is_an_error_that_names_it(lead):
    three = lead.training(3)
    lead.process.kill()
    begun = time.monotonic()
    errors = together(three, lambda client: begin(client, 1))
    assert all(isinstance(error, WorkerError) for error in errors)
    host, port = lead.address
    assert f"has lost the lead at {host}:{port}" in str(errors[0])
    assert "ks.callbacks.Resume" in str(errors[0])
    assert time.monotonic() - begun < 10


def test_a_lead_that_stops_for_a_while_loses_no_worker(lead):
    three = lead.training(3)
    lead.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    lead.process.send_signal(signal.SIGCONT)
    assert len(together(three, exchange)[0]) == 3
    assert three[0].generation.number == 1


def test_a_worker_that_waits_hears_that_training_has_ended():
    with RunningLead(3, max_workers=2) as lead:
        two = lead.training(2)
        spare = lead.client(2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(spare.next_generation, None)
            together(two, LeadClient.leave)
            assert isinstance(waiting.exception(20), TrainingEnded)
        spare.abandon()
        assert lead.process.wait(20) == 0


def test_a_fixed_group_ends_its_lead_at_once():
    with RunningLead(2, is_fixed=True, timeout=60.0) as lead:
        together(lead.training(2), LeadClient.leave)
        assert lead.process.wait(10) == 0


def test_all_workers_lost_end_the_lead():
    with RunningLead(2, timeout=0.5, patience=2.0) as lead:
        for client in lead.training(2):
            client.abandon()
        assert lead.process.wait(20) == UNFINISHED


@pytest.mark.slow(seconds=9)
def test_a_wrong_secret_and_another_job_are_errors(lead):
    for options, problem in (
        ({"secret": b"wrong"}, "it does not accept this worker's secret"),
        ({"job": "other"}, "of another cluster"),
    ):
        secret = options.pop("secret", SECRET)
        with pytest.raises(WorkerError, match=problem):
            LeadClient([lead.address], secret, 0, timeout=4.0, **options)


def test_two_processes_of_an_index_and_different_versions_are_refused():
    with RunningLead(3) as lead:
        clients = together([0, 1, 1], lead.client)
        errors = together(clients, lambda client: client.next_generation(None))
        assert all(isinstance(error, ClusterError) for error in errors)
        assert "Two processes connected as worker 1" in str(errors[0])
    with RunningLead(2) as lead:
        same = [{"the backend": "jax"}, {"the backend": "torch"}]
        found = together(
            range(2), lambda i: lead.client(i, same=same[i]).next_generation(None)
        )
        assert all(isinstance(error, ClusterError) for error in found)
        assert "Workers disagree on the backend" in str(found[0])
