"""Every public name of `tf.distribute`, and every parameter, is in `ks` or on a list.

The list is `docs/migrating-from-tf-distribute.md`. Names are written there as in
TensorFlow, without `tf.distribute.`: `Strategy.run`, and `Server(protocol=)` for a
parameter. A row that ends with "same" or "better" is in `ks`; "not here" is not.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="compares with TensorFlow"
)
PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-tf-distribute.md"
ROW = re.compile(r"^\| (`[^|]*`) \| (same|better|not here) \| [^|]+\|$", re.MULTILINE)
# Inherited members are listed with the class that declares them for users.
BASES = ("Strategy", "cluster_resolver.ClusterResolver", "CrossDeviceOps")


MISSING = object()


def tf_distribute() -> Any:
    import tensorflow as tf

    return tf.distribute


def rows() -> dict[str, str]:
    """What the page says of each name."""
    found = {}
    for names, verdict in ROW.findall(PAGE.read_text()):
        for name in re.findall("`([^`]+)`", names):
            assert name not in found, f"{name} is on the page twice"
            found[name] = verdict
    return found


def members(owner: Any) -> list[str]:
    # `InputOptions` and `RunOptions` are named tuples there.
    inherited = {"count", "index"} if issubclass(owner, tuple) else set()
    return [name for name in dir(owner) if name[0] != "_" and name not in inherited]


def walk(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The names in a module and in its modules, with what they are."""
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_"):
            continue
        yield path + name, value
        if isinstance(value, types.ModuleType):
            yield from walk(value, f"{path}{name}.")


def found_in_ks(path: str) -> Any:
    value: Any = ks
    for part in path.split("."):
        value = getattr(value, part, MISSING)
    return value


def member_of(owner: Any, name: str) -> Any:
    # Fields of a dataclass without a default are no attributes of the class.
    fields = getattr(owner, "__dataclass_fields__", {})
    return getattr(owner, name, fields.get(name, MISSING))


def owner_of(path: str, value: type, member: str) -> str:
    """The first of `BASES` that has the member, or the class itself."""
    for base in BASES:
        declared = tf_distribute()
        for part in base.split("."):
            declared = getattr(declared, part)
        if issubclass(value, declared) and hasattr(declared, member):
            return base
    return path


def parameters(called: Any) -> list[str]:
    """Names of what may be passed by position, in order."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    found = inspect.signature(called).parameters.values()
    return [p.name for p in found if p.kind in kinds and p.name != "self"]


def missing_parameters(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Parameters that `ours` does not take, or takes in another place."""
    found = parameters(ours)
    for i, name in enumerate(parameters(theirs)):
        if name not in found[i : i + 1]:
            yield f"{path}({name}=)"


def public() -> dict[str, tuple[Any, Any]]:
    """Every name of `tf.distribute` and every member, theirs and ours."""
    found: dict[str, tuple[Any, Any]] = {}
    for path, theirs in walk(tf_distribute()):
        ours = found_in_ks(path)
        found[path] = theirs, ours
        if isinstance(theirs, type):
            for member in members(theirs):
                name = f"{owner_of(path, theirs, member)}.{member}"
                if found.get(name, (None, None))[1] is not MISSING:
                    found[name] = getattr(theirs, member), member_of(ours, member)
    return found


def differences() -> set[str]:
    """What is not in `ks`."""
    found = set()
    for path, (theirs, ours) in public().items():
        if ours is MISSING:
            found.add(path)
        elif callable(theirs):
            try:
                found.update(missing_parameters(path, theirs, ours))
            except ValueError:  # No signature: an enumeration's member, a built-in.
                continue
    return found


def test_every_name_is_on_the_page() -> None:
    assert set(public()) - set(rows()) == set()


def test_what_is_not_in_ks_is_on_the_page_and_nothing_else() -> None:
    listed = {name for name, verdict in rows().items() if verdict == "not here"}
    assert differences() == listed


def test_the_page_names_nothing_else() -> None:
    names = {name for name in rows() if "=" not in name}
    assert names - set(public()) == set()
