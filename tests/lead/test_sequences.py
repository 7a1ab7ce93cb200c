"""Sequences of events: random ones, and all of a small group, keep the invariants."""

from __future__ import annotations

import pytest
from lead import model, small_groups

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize("first", range(0, 10_000, 2_500))
def test_random_sequences_keep_the_invariants(first):
    for seed in range(first, first + 2_500):
        model.play(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(10_000, 1_010_000, 50_000))
def test_a_million_random_sequences_keep_the_invariants(first):
    for seed in range(first, first + 50_000):
        model.play(seed)


def test_all_sequences_of_two_faults_keep_the_invariants():
    assert small_groups.check_all(3, 2, delays=(0, 2)) > 300


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("depth", "delays", "least"), [(3, (0, 1, 3), 16_000), (4, (0, 2), 100_000)]
)
def test_all_sequences_of_more_faults_keep_the_invariants(depth, delays, least):
    assert small_groups.check_all(3, depth, delays) > least
