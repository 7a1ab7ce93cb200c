"""The lead that a launcher starts."""

from __future__ import annotations

import pytest
from harness.processes import wait_until
from lead.leads import SECRET, begin, together

from keras_strategies.cluster.environment import LEAD
from keras_strategies.cluster.spec import split_address
from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.state import Settings
from keras_strategies.processes.launched_lead import LaunchedLead, launched_lead
from keras_strategies.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.one_backend("jax")

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2"]


def connected(lead: LaunchedLead, **settings: float) -> list[LeadClient]:
    """Two workers in their first generation."""
    found = lead.variables(ADDRESSES[0])[LEAD].split()
    assert found[0] == ADDRESSES[0]
    address = split_address(found[1])

    def connect(index: int) -> LeadClient:
        given = Settings(2, patience=20.0, **settings)
        return LeadClient([address], SECRET, index, timeout=20.0, settings=given)

    return together(together(range(2), connect), begin)


@pytest.mark.multiprocess
def test_it_is_started_again_until_training_has_ended():
    with LaunchedLead(ADDRESSES, SECRET.decode()) as lead:
        first = lead._process
        two = connected(lead, timeout=5.0)
        # Settings are those of the first worker of each training.
        assert [each.timeout for each in two] == [5.0, 5.0]
        for each in two:
            each.abandon()
        wait_until(lambda: lead._process is not first, "another one is started")
        two = connected(lead, timeout=7.0)
        assert [each.timeout for each in two] == [7.0, 7.0]
        together(two, lambda each: each.leave())
        wait_until(lambda: not lead._watch.is_alive(), "training has ended")
        assert lead._process.wait(20) == 0
    assert first.wait(20) != 0


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("cluster", "has_one"),
    [
        (LocalCluster(2), True),
        (LocalCluster(1, chief=True), True),
        (LocalCluster(1), False),
        (LocalCluster(2, ps=1, chief=True), False),
    ],
)
def test_workers_have_one_and_tasks_of_parameter_servers_do_not(cluster, has_one):
    with launched_lead(cluster.environments({})) as environments:
        assert {LEAD in each for each in environments.values()} == {has_one}
