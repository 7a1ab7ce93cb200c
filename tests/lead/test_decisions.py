"""Single rules of the lead's decisions."""

from __future__ import annotations

import pytest
from lead.rules import Lead

from keras_strategies.lead import events
from keras_strategies.lead.events import TICK, Beat
from keras_strategies.lead.state import Phase

pytestmark = pytest.mark.one_backend


def arrived(uid, number, value="", what="a batch", generation=1, stream=""):
    return events.Arrived(uid, generation, stream, number, what, value)


# Generations


def test_all_workers_begin_together_and_run_when_all_hold_the_state():
    lead = Lead(3)
    assert "begin" not in lead.come("0a")
    assert "begin" not in lead.come("2a")
    begin = lead.come("1a")["begin"]
    assert begin.body["members"] == (0, 1, 2) and begin.body["is_first"]
    assert begin.body["lost"] == begin.body["joined"] == []
    assert "go" not in lead.feed(events.Holds("0a", 1, 0))
    assert "go" in lead.hold(0)


def test_a_loss_ends_the_generation_and_the_others_begin_at_the_newest_step():
    lead = Lead.training(3)
    end = lead.feed(events.Gone("0a", Beat(6, "step 6 of fit")))["end"]
    assert end.to == ("1a", "2a")
    assert "Worker 0 (host, process 0) was lost at step 6 of fit" in end.body["how"]
    assert lead.ready(6, "1a") == {}
    begin = lead.ready(7, "2a")["begin"].body
    assert begin["step"] == 7 and begin["members"] == (2, 1) and begin["behind"] == [1]
    assert begin["lost"] == [0] and begin["joined"] == []


def test_equal_messages_that_come_together_are_as_one_after_the_other():
    lead = Lead.training(4)
    value = arrived("2a", 0, "x")
    assert "compared" not in lead.feed(value._replace(others=("0a", "4z")))
    found = lead.feed(arrived("1a", 0, "y")._replace(others=("3a",)))["compared"]
    values = [("a batch", "x", "5"), ("a batch", "y", "a")]
    assert found.to == ("0a", "1a", "2a", "3a") and found.body["values"] == values
    end = lead.feed(events.Ready("1a", 3, others=("2a",)))["end"]
    assert end.to == ("0a", "3a") and "worker 1" in end.body["how"]
    begin = lead.feed(events.Ready("3a", 3, others=("0a",)))["begin"]
    assert begin.to == ("0a", "1a", "2a", "3a") and begin.body["step"] == 3
    assert "go" not in lead.feed(events.Holds("0a", 2, 3, others=("1a", "4z")))
    assert "go" in lead.feed(events.Holds("2a", 2, 3, others=("3a",)))


def test_a_stopped_worker_is_lost_and_its_state_counts_when_it_returns():
    lead = Lead.training(2)
    assert "no heartbeat for 2 s" in lead.stop("0a")["end"].body["how"]
    assert lead.ready(5, "1a")["begin"].body["members"] == (1,)
    lead.hold(5)
    lead.silent = set()
    lead.ready(4, "0a")
    lead.lose("1a")
    found = lead.wait(3)
    assert found["begin"].to == ("0a",) and found["begin"].body["step"] == 4


def test_no_state_is_an_error_that_names_the_snapshot_and_no_new_beginning():
    lead = Lead.training(2)
    lead.feed(events.Snapshot("0a", 8, "/runs/8"))
    lead.feed(events.Snapshot("1a", 4, "/runs/4"))
    lead.lose("0a", "1a")
    lead.come("0b")
    assert not lead.state.is_over
    over = lead.come("1b")["over"]
    assert set(over.to) == {"0b", "1b"}
    assert "No worker has the state" in over.body["error"]
    assert "they continue at the last snapshot, '/runs/8'" in over.body["error"]


def test_without_any_worker_training_ends_soon():
    lead = Lead.training(2, timeout=60.0)
    lead.lose("0a")
    lead.wait(1)
    lead.lose("1a")
    lead.wait(1.5)
    assert not lead.state.is_over
    lead.wait(1)
    assert "No worker has the state" in lead.state.verdict


def test_a_process_in_the_place_of_another_one_shows_that_it_has_ended():
    lead = Lead.training(2, timeout=60.0)
    lead.lose("0a", "1a")
    lead.come("0b")
    assert not lead.state.is_over
    assert "No worker has the state" in lead.come("1b")["over"].body["error"]


def test_a_newer_snapshot_counts_more_than_an_older_state():
    lead = Lead.training(2)
    lead.stop("0a")
    lead.begin(5, "1a")
    lead.feed(events.Snapshot("1a", 8, "/runs/8"))
    lead.silent = set()
    lead.ready(4, "0a")
    lead.lose("1a")
    error = lead.wait(3)["over"].body["error"]
    assert "the state after action 4, which is older" in error and "/runs/8" in error


def test_an_older_state_waits_for_a_newer_one_that_may_return():
    lead = Lead.training(2)
    lead.stop("0a")
    lead.begin(5, "1a")
    lead.feed(events.Tick(lead.now, {"1a": Beat(90)}))
    lead.resume()
    assert "pause" in lead.ready(4, "0a")
    assert "begin" not in lead.lose("1a")
    lead.feed(events.Hello("1a", 1, generation=2, step=90))
    begin = lead.ready(90, "1a")["begin"].body
    assert begin["step"] == 90 and begin["members"] == (1, 0)


def test_a_state_counts_from_when_its_worker_connects_again():
    lead = Lead.training(2)
    lead.lose("0a")
    lead.begin(5, "1a")
    lead.wait(3)
    assert "0a" not in lead.state.workers
    lead.feed(events.Hello("0a", 0, step=9))
    assert "begin" not in lead.ready(5, "1a")
    assert lead.ready(9, "0a")["begin"].body["step"] == 9


def test_a_worker_that_connects_again_is_awaited():
    lead = Lead.training(3)
    lead.lose("2a")
    lead.feed(events.Hello("2a", 2, generation=1, step=3))
    lead.ready(3, "0a")
    assert "begin" not in lead.ready(3, "1a")
    assert len(lead.ready(3, "2a")["begin"].to) == 3


def test_a_beat_that_is_older_than_the_last_message_changes_no_step():
    lead = Lead.training(1)
    lead.ready(83, "0a")
    lead.feed(events.Tick(TICK, {"0a": Beat()}))
    assert lead.state.workers["0a"].step == 83


def test_a_new_worker_joins_after_the_most_steps_begun():
    lead = Lead.training(3)
    lead.lose("2a")
    lead.begin(3, "0a", "1a")
    assert "pause" in lead.come("2b")
    assert "stop_after" not in lead.feed(events.Begun("0a", 2, 5))
    assert lead.feed(events.Begun("1a", 2, 4))["stop_after"].body["count"] == 5
    lead.feed(events.Ready("1a", 8, is_planned=True))
    begin = lead.feed(events.Ready("0a", 8, is_planned=True))["begin"].body
    assert begin["members"] == (0, 1, 2) and begin["behind"] == [2]
    assert begin["step"] == 8 and begin["joined"] == [2]


def test_new_workers_do_not_begin_after_a_step_that_admits_none():
    lead = Lead.training(2)
    lead.lose("1a")
    lead.come("1b")
    begin = lead.feed(events.Ready("0a", 7, admits=False))["begin"].body
    assert begin["members"] == (0,)
    assert "pause" in lead.hold(7)


def test_of_two_processes_of_an_index_that_with_the_state_begins():
    lead = Lead.training(2)
    lead.lose("0a")
    lead.come("1b")
    begin = lead.ready(3, "1a")["begin"]
    assert begin.to == ("1a",) and begin.body["members"] == (1,)
    lead.hold(3)
    assert lead.state.group.phase is Phase.RUNNING


def test_a_silent_worker_that_waits_is_not_chosen():
    lead = Lead(3, max_workers=2)
    lead.run("0a", "1a")
    lead.come("2a")
    lead.silent = {"2a"}
    lead.wait(3)
    lead.lose("0a")
    assert lead.ready(2, "1a")["begin"].to == ("1a",)


def test_a_member_that_fails_before_the_common_step_ends_the_generation():
    lead = Lead.training(3)
    lead.lose("2a")
    lead.begin(3, "0a", "1a")
    lead.come("2b")
    lead.feed(events.Begun("0a", 2, 1))
    lead.feed(events.Begun("1a", 2, 1))
    assert lead.state.group.phase is Phase.STOPPING
    assert "could not continue" in lead.ready(3, "0a")["end"].body["how"]


def test_workers_above_the_largest_number_wait_as_spares():
    lead = Lead(3, max_workers=2)
    lead.run("0a", "1a")
    assert "pause" not in lead.come("2a")
    lead.lose("0a")
    assert lead.ready(2, "1a")["begin"].body["members"] == (1, 2)


def test_too_few_workers_wait_and_then_end_with_the_missing_ones():
    lead = Lead.training(3, min_workers=2, addresses=("a:1", "b:1", "c:1"))
    lead.lose("0a", "1a")
    assert "begin" not in lead.ready(2, "2a")
    over = lead.wait(10.5)["over"]
    assert over.to == ("2a",)
    assert "without worker 0 (a:1) and worker 1 (b:1)" in over.body["error"]


def test_members_of_a_generation_cut_off_from_the_lead_keep_their_lease():
    lead = Lead.training(2, patience=1.0)
    lead.stop("0a")
    lead.begin(1, "1a")
    lead.resume()
    lead.ready(1, "0a")
    lead.lose("1a")
    assert "begin" not in lead.wait(1.75)
    assert "begin" in lead.wait(1)


def test_a_stopped_member_may_have_trained_on_for_an_unknown_time():
    lead = Lead.training(2, patience=30.0)
    lead.stop("0a")
    lead.begin(1, "1a")
    lead.stop("1a")
    lead.ready(1, "0a")
    assert "begin" not in lead.wait(5)
    lead.resume()
    assert lead.ready(9, "1a")["begin"].body["step"] == 9


def test_a_busy_member_is_awaited_before_the_next_generation_begins():
    lead = Lead.training(3)
    lead.lose("2a")
    lead.ready(3, "0a")
    assert "begin" not in lead.wait(5)
    assert lead.ready(3, "1a")["begin"].body["members"] == (0, 1)


def test_a_member_that_does_not_get_ready_is_excluded():
    lead = Lead(2)
    lead.come("0a")
    lead.come("1a")
    lead.feed(events.Holds("0a", 1, 0))
    how = lead.wait(10.5)["end"].body["how"]
    assert "Worker 1" in how and "it was not ready within 10 s" in how


def test_failures_without_a_loss_end_after_some_repetitions():
    lead = Lead.training(2, failures=2)
    for _ in range(2):
        lead.ready(0, "0a")
        lead.ready(0, "1a")
        lead.hold(0)
    over = lead.ready(0, "0a")["over"]
    assert "worker 0" in over.body["error"] and "2 times" in over.body["error"]


def test_without_rejoin_a_new_worker_is_refused():
    lead = Lead.training(2, rejoin=False)
    lead.lose("1a")
    lead.begin(3, "0a")
    over = lead.come("1b")["over"]
    assert over.to == ("1b",) and "`Elastic(rejoin=False)`" in over.body["error"]


def test_a_pause_of_the_lead_is_no_silence_of_workers():
    lead = Lead.training(2)
    lead.now += 30.0
    assert lead.feed(events.Tick(lead.now, {})) == {}
    assert lead.state.group.phase is Phase.RUNNING


def test_an_older_state_does_not_train_on_when_training_has_ended():
    lead = Lead.training(3)
    lead.stop("0a")
    lead.begin(5, "1a", "2a")
    lead.feed(events.Tick(lead.now, {"1a": Beat(90), "2a": Beat(90)}))
    lead.feed(events.Bye("1a", True, ""))
    lead.resume()
    lead.ready(4, "0a")
    lead.lose("2a")
    assert lead.wait(3)["over"].body["error"] == ""


def test_a_late_worker_hears_that_training_has_ended():
    lead = Lead.training(2)
    lead.feed(events.Bye("0a", True, ""))
    assert lead.feed(events.Bye("1a", True, ""))["over"].body["error"] == ""
    assert lead.come("1b")["over"].body["error"] == ""


# Fixed groups


def test_a_loss_in_a_fixed_group_is_an_error_that_names_it():
    lead = Lead.training(2, is_fixed=True)
    lead.feed(events.Tick(0.0, {"1a": Beat(3, "step 3 of fit", (20, 0.25, 0.0))}))
    lead.feed(events.Tick(0.0, {"0a": Beat(3, "step 3 of fit", (20, 0.05, 0.0))}))
    over = lead.lose("1a")["over"].body
    assert over["error"] == (
        "Worker 1 (host, process 0) was lost at step 3 of fit: its process or its "
        "connection ended. Its last steps took 250 ms each without waits for other "
        "workers, those of the others 50 ms."
    )
    assert over["loss"].worker == over["loss"].rank == 1


def test_a_fixed_group_waits_for_all_and_names_those_that_did_not_come():
    lead = Lead(3, is_fixed=True, addresses=("a:1", "b:1", "c:1"))
    lead.wait(30)
    lead.come("0a")
    assert "over" not in lead.wait(9.5)
    lead.come("2a")
    over = lead.wait(1)["over"]
    assert set(over.to) == {"0a", "2a"}
    assert "Of 3 workers, worker 1 (b:1) did not connect" in over.body["error"]


def test_a_worker_that_cannot_come_ends_the_wait():
    lead = Lead(2, is_fixed=True)
    lead.come("0a")
    over = lead.feed(events.Absent("0a", "worker 1's pod has failed"))["over"]
    assert over.body["error"] == "worker 1's pod has failed"


def test_a_fixed_group_stops_after_a_common_step_and_goes_on():
    lead = Lead(2, is_fixed=True)
    lead.come("0a")
    lead.feed(events.Stop("0a"))
    lead.come("1a")
    assert "pause" in lead.hold(0)
    lead.feed(events.Begun("0a", 1, 3))
    stop = lead.feed(events.Begun("1a", 1, 4))["stop_after"]
    assert stop.body["count"] == 4 and lead.state.group.phase is Phase.RUNNING
    assert "pause" in lead.feed(events.Stop("1a"))


def test_workers_that_differ_are_refused():
    lead = Lead(2)
    lead.come("0a", same={"the version": "1"})
    over = lead.come("1a", same={"the version": "2"})["over"].body
    assert "worker 0 has '1', worker 1 has '2'" in over["error"] and over["is_misuse"]
    assert lead.state.is_over


def test_a_new_worker_with_another_version_is_refused_alone():
    lead = Lead(2)
    lead.come("0a", same={"the version": "1"})
    lead.come("1a", same={"the version": "1"})
    lead.hold(0)
    lead.lose("1a")
    other = events.Hello("1b", 1, same={"the version": "2"})
    over = lead.feed(other)["over"]
    assert over.to == ("1b",) and over.body["is_misuse"]
    assert not lead.state.is_over


def test_two_processes_of_an_index_are_both_named_at_the_start():
    lead = Lead(3)
    lead.come("0a", pid=11)
    lead.come("0b", pid=12)
    over = lead.wait(2)["over"]
    assert set(over.to) == {"0a", "0b"} and over.body["is_misuse"]
    assert "process 11 on host, and process 12 on host" in over.body["error"]


def test_a_second_process_of_an_index_is_refused_if_the_first_lives():
    lead = Lead.training(2)
    lead.come("1b")
    found = lead.wait(5)
    assert "pause" not in found
    over = found["over"]
    assert over.to == ("1b",) and "Two processes" in over.body["error"]
    assert not lead.state.is_over


# Comparisons, failures and files


def test_equal_values_are_answered_once_and_others_with_their_ranks():
    lead = Lead.training(3)
    for uid, value in (("0a", "x"), ("1a", "y"), ("2a", "x")):
        found = lead.feed(arrived(uid, 0, value, "facts"))
    values = found["compared"].body["values"]
    assert values == [("facts", "x", "5"), ("facts", "y", "2")]
    for uid in ("0a", "1a", "2a"):
        found = lead.feed(arrived(uid, 1, "same"))
    assert found["compared"].body["values"] == [("a batch", "same", "")]


def test_values_of_an_older_generation_are_not_compared():
    lead = Lead.training(2)
    lead.begin(1, "0a", "1a")
    lead.feed(arrived("0a", 0, "old", generation=1))
    lead.feed(arrived("1a", 0, "new", generation=2))
    found = lead.feed(arrived("0a", 0, "new", generation=2))
    assert found["compared"].body["values"] == [("a batch", "new", "")]


def test_a_late_comparison_names_who_has_not_arrived_and_in_which_line():
    lead = Lead.training(2, patience=4.0)
    lead.feed(arrived("0a", 0, what="the end of batch 10"))
    lead.feed(events.Tick(0.0, {"1a": Beat(9, "step 9 of fit")}))
    lead.wait(3)
    lead.feed(events.Stack("1a", "train.py:31"))
    late = lead.wait(3)["late"]
    assert late.to == ("0a",)
    assert "Not all workers reached 'the end of batch 10'" in late.body["error"]
    where = "worker 1 (host, process 0, at step 9 of fit, in train.py:31)"
    assert where in late.body["error"]


def test_a_member_that_leaves_ends_the_waits_of_others():
    lead = Lead.training(2, is_fixed=True)
    lead.feed(arrived("0a", 0, what="the end of the epoch"))
    over = lead.feed(events.Bye("1a", True, ""))["over"].body["error"]
    assert "it exited while others wait in 'the end of the epoch'" in over


def test_a_comparison_after_a_member_has_left_ends_the_generation():
    lead = Lead.training(2)
    assert lead.feed(events.Bye("1a", True, "")).keys() == {"bye", "exited"}
    assert "it exited while" in lead.feed(arrived("0a", 0))["end"].body["how"]


def test_a_failure_is_sent_to_the_others_and_explains_the_loss():
    lead = Lead.training(3, is_fixed=True)
    failed = events.Failed("1a", "ValueError: bad", "step 7 of fit", 3)
    found = lead.feed(failed)["failed"]
    assert found.to == ("0a", "2a") and found.body["call"] == 3
    lead.feed(events.Tick(0.0, {"1a": Beat(7, "the end")}))
    error = lead.lose("1a")["over"].body["error"]
    assert "was lost at step 7 of fit: ValueError: bad" in error


def test_files_are_waited_for_until_the_chief_goes_on():
    lead = Lead.training(2)
    wait = events.AwaitsFile("1a", 1, 0, "a.keras", 1, 1)
    assert lead.feed(wait) == {}
    assert lead.feed(events.Saved("0a", 1, 0, "b.keras", "")) == {}
    found = lead.feed(events.Saved("0a", 1, 0, "a.keras", ""))
    assert found["file"].body["error"] == ""
    lead.feed(wait._replace(name="c.keras", calls=3))
    found = lead.feed(arrived("0a", 0))
    assert "without saving" in found["file"].body["error"]


def test_a_file_with_another_name_is_that_of_the_same_call():
    lead = Lead.training(2)
    lead.feed(events.AwaitsFile("1a", 1, 0, "of-worker-1.keras", 1, 1))
    lead.feed(events.Saved("0a", 1, 0, "of-worker-0.keras", "OSError: full"))
    found = lead.feed(arrived("0a", 0))
    assert found["file"].body["error"] == "OSError: full"


def test_the_table_of_workers_has_their_steps_and_silence():
    lead = Lead.training(2)
    lead.silent = {"1a"}
    lead.wait(1)
    lead.feed(events.Tick(lead.now, {"0a": Beat(3, "step 3", (3, 0.1, 0.2))}))
    rows = lead.feed(events.AskStatus("0a"))["status"].body["workers"]
    assert [row["step"] for row in rows] == [3, 0]
    assert [row["silent"] for row in rows] == [0.0, 1.0]
    assert rows[0]["times"] == (3, 0.1, 0.2)
