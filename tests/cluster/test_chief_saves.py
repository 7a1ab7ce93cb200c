"""Waits for files of the chief, without processes."""

from __future__ import annotations

import dataclasses

from keras_strategies.cluster.group.chief_saves import ChiefSaves, SavedFile, SaveWait


def waits(position: int, path: str, same: int = 1, calls: int = 1) -> SaveWait:
    return SaveWait(1, position, path, same, calls)


def test_a_worker_waits_for_the_call_with_its_name() -> None:
    saves = ChiefSaves()
    first = waits(3, "a")
    saves.wait(first)
    saves.save(2, SavedFile("a", ""))
    saves.save(3, SavedFile("other", ""))
    assert saves.take_answers() == []
    saves.save(3, SavedFile("a", ""))
    assert saves.take_answers() == [(first, None)]
    second = waits(3, "a", same=2, calls=2)
    saves.wait(second)
    assert saves.take_answers() == []
    saves.save(3, SavedFile("a", "OSError: disk full"))
    assert saves.take_answers() == [(second, "OSError: disk full")]


def test_names_that_differ_correspond_when_the_chief_goes_on() -> None:
    saves = ChiefSaves()
    own = waits(3, "temporary")
    saves.wait(own)
    saves.save(3, SavedFile("a", ""))
    assert saves.take_answers() == []
    late = dataclasses.replace(own, any_name=True)
    saves.wait(late)
    assert saves.take_answers() == [(late, None)]
    saves.begin(3)
    assert saves.take_answers() == [(own, None)]


def test_a_chief_that_goes_on_or_leaves_without_saving_is_an_error() -> None:
    for end in (lambda saves: saves.begin(3), ChiefSaves.leave):
        saves = ChiefSaves()
        saves.save(2, SavedFile("a", ""))
        saves.wait(waits(3, "a"))
        saves.begin(2)
        assert saves.take_answers() == []
        end(saves)
        [(_, problem)] = saves.take_answers()
        assert problem is not None and "without saving" in problem
