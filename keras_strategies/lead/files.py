"""Files that the chief saves, for workers that wait for them.

Calls between two comparisons correspond to each other. A worker waits for the call with
the name of its file: the chief alone may save other files in between, for example in
`ModelCheckpoint`. If the names differ, as those of scripts that choose them by the
worker, the chief has saved when it begins the next comparison.
"""

from __future__ import annotations

import math

from keras_strategies.lead.events import AwaitsFile, Out, Saved
from keras_strategies.lead.state import LeadState, replace

#: Error of a wait for a file that the chief does not save.
WENT_ON = "it went on without saving. All workers must make the same calls"
# Seconds after the patience in which a call with another name may follow.
_MORE = 2.0


def saved(state: LeadState, event: Saved, out: Out) -> LeadState:
    """The chief has saved a file."""
    if event.generation != state.group.number:
        return state
    before = state.files.get(event.position, ())
    files = {**state.files, event.position: (*before, event)}
    return answer_waits(replace(state, files=files), out)


def awaits_file(state: LeadState, event: AwaitsFile, out: Out) -> LeadState:
    """A member waits for a file."""
    if event.generation != state.group.number or not state.group.is_active:
        return state
    waits = {**state.file_waits, event.uid: (event, state.clock)}
    return answer_waits(replace(state, file_waits=waits), out)


def chief_compares(state: LeadState, number: int, out: Out) -> LeadState:
    """The chief begins a comparison: it saves no other files before it."""
    files = {at: each for at, each in state.files.items() if at >= number}
    state = replace(state, files=files, chief_position=number + 1)
    return answer_waits(state, out) if state.file_waits else state


def chief_leaves(state: LeadState, out: Out) -> LeadState:
    """The chief has left, and saves no file any longer."""
    return answer_waits(replace(state, chief_position=math.inf), out)


def answer_waits(state: LeadState, out: Out) -> LeadState:
    """Ends the waits for files that the chief has saved, or will not save."""
    waits = dict(state.file_waits)
    for uid, (wait, since) in state.file_waits.items():
        if (error := _error(state, wait, state.clock - since)) is not None:
            del waits[uid]
            place = {"position": wait.position, "calls": wait.calls}
            out.tell((uid,), "file", **place, error=error)
    return replace(state, file_waits=waits)


def _error(state: LeadState, wait: AwaitsFile, waited: float) -> str | None:
    """The reason why there is no file, empty if there is one; None to wait on."""
    files = state.files.get(wait.position, ())
    same = [file for file in files if file.name == wait.name]
    if len(same) >= wait.same:
        return same[wait.same - 1].error
    patience = state.settings.patience
    has_begun = state.chief_position > wait.position
    if not has_begun and waited <= patience:
        return None
    if len(files) >= wait.calls:
        return files[wait.calls - 1].error
    if has_begun:
        return WENT_ON
    if waited <= patience + _MORE:
        return None
    return f"it did not save it within {patience:g} s"
