"""Mistakes planted in the decisions are found: by single rules, or by sequences."""

from __future__ import annotations

import inspect
import types

import pytest
from lead import model, test_decisions

from keras_strategies.lead import decisions, files, generations, values

pytestmark = pytest.mark.one_backend

RULES = [
    each
    for name, each in vars(test_decisions).items()
    if name.startswith("test_") and not inspect.signature(each).parameters
]

#: Mistakes by module: what they replace, and by what.
MISTAKES = [
    # Which state counts.
    (generations, "if not is_late and _may_get_newer(", "if False and (state, "),
    (generations, "-_steps(w), ranks", "_steps(w), ranks"),
    (generations, "-1 if newest is None else newest + 1", "10**6"),
    (generations, "if state.has_run and newest is None:", "if False:"),
    (generations, "newest + 1 < state.snapshot[0]", "False"),
    (generations, "step=event.step, admits", "admits"),
    (decisions, "state.snapshot[0] >= event.step", "False"),
    (decisions, "if beat.step is not None:", "if True:"),
    (decisions, "gone=None, seen=state.clock, step=event.step", "gone=None"),
    (decisions, "each.gone is None or each.gone >= limit", "each.gone is None"),
    (generations, "or (each.uid in ranks and not is_bound)", ""),
    (generations, "newest + 1 < state.completed", "False"),
    (decisions, "state = _without_earlier(state, event.index)", "pass"),
    (decisions, "if state.is_over or not state.has_run or None in gone:", "if True:"),
    # One generation at a time, of the right workers.
    (generations, "if _may_still_train(state, found):", "if False:"),
    (generations, "first.setdefault(each.index, each)", "first[each.uid] = each"),
    (generations, "if state.group.awaited or state.is_over:", "if state.is_over:"),
    (generations, "if state.is_present(each):", "if True:"),
    (generations, "found[: settings.most]", "found"),
    (generations, "if len(found) < settings.least:", "if not found:"),
    (generations, "or found[0].admits", "or True"),
    (generations, "if not joins or len(members)", "if len(members)"),
    (generations, "or len(members) >= state.settings.most:", ":"),
    (generations, "max(group.last_step, event.steps)", "event.steps"),
    (generations, "Phase.STOPPING and event.is_planned", "Phase.STOPPING"),
    (generations, "_without_waits(state), group=group", "state, group=group"),
    (generations, "if group.failures >= settings.failures:", "if False:"),
    (generations, "if group.is_active and silent:", "if False:"),
    (generations, "if late and group.phase is Phase.SYNCING:", "if False:"),
    (
        generations,
        "if state.settings.is_fixed:\n        return over",
        "if 0: return over",
    ),
    (generations, "_pause(state, out) if state.is_stop_asked else", ""),
    (generations, "not settings.rejoin:", "False:"),
    (generations, "(event.uid, *event.others) if uid", "(event.uid,) if uid"),
    (generations, "intersection((event.uid, *event.others))", "intersection(event)"),
    (values, "in (event.uid, *event.others):", "in event[:1]:"),
    (generations, "if not (state.workers or state.group.number):", "if False:"),
    (decisions, "min(passed, 2 * TICK)", "passed"),
    (decisions, "if (why := _difference(state, event)) is not None:", "if False:"),
    (
        decisions,
        "return state if state.has_run else generations.over(state, e",
        "return (e",
    ),
    (decisions, "if worker.uid in state.waiting and late:", "if False:"),
    (decisions, "if not state.has_run and other.seen", "if False and other.seen"),
    (decisions, "awaited=group.awaited | {event.uid}", "awaited=group.awaited"),
    (decisions, "if state.workers.keys().isdisjoint(group.ranks):", "if False:"),
    # Comparisons, failures and files.
    (values, "if found.arrived == (1", "if len(found.values) == 3 or not (1"),
    (values, "state = files.chief_compares(state, event.number, out)", "pass"),
    (values, "return check_left(state, out)", "return state"),
    (values, "if waited > patience + _MORE and not each.is_late:", "if False:"),
    (values, "event.generation != group.number or not", "not"),
    (files, "if len(same) >= wait.same:", "if files:"),
    (files, "if len(files) >= wait.calls:", "if False:"),
    (decisions, "beat.progress is not None and not worker.failure", "beat.progress"),
]
#: Those that random sequences find; others cost time, or only a single rule shows them.
BY_SEQUENCES = [
    "-_steps(w), ranks",
    "_without_waits(state), group=group",
    "found[: settings.most]",
    "if beat.step is not None:",
    "if len(found) < settings.least:",
    "if not is_late and _may_get_newer(",
    "if state.group.awaited or state.is_over:",
    "if state.has_run and newest is None:",
    "or found[0].admits",
    "or len(members) >= state.settings.most:",
    "step=event.step, admits",
]


def plant(monkeypatch, module, old, new):
    """Changes a module's functions, also where others have imported them."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{source.count(old)} times: {old}"
    changed = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed)
    for name, function in list(vars(module).items()):
        is_own = getattr(function, "__module__", "") == module.__name__
        if isinstance(function, types.FunctionType) and is_own:
            monkeypatch.setattr(function, "__code__", changed[name].__code__)


def found_by_rules():
    for rule in RULES:
        try:
            rule()
        except Exception:
            return rule.__name__
    return ""


def found_by_sequences(count):
    for seed in range(count):
        try:
            model.play(seed)
        except Exception as error:
            return str(error)
    return ""


def test_without_a_mistake_none_is_found():
    assert found_by_rules() == ""


@pytest.mark.parametrize(
    ("module", "old", "new"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))]
)
def test_a_mistake_is_found(monkeypatch, module, old, new):
    plant(monkeypatch, module, old, new)
    assert found_by_rules() or found_by_sequences(500)


@pytest.mark.parametrize("old", BY_SEQUENCES)
def test_a_mistake_is_found_by_sequences(monkeypatch, old):
    plant(monkeypatch, *next(each for each in MISTAKES if each[1] == old))
    assert found_by_sequences(500)
