"""Installs and removes the patches of the manifest."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.errors import BackendError
from keras_strategies.keras_compat.manifest import GROUPS, VERSIONS, Patch

#: Replaced attributes by group: owner, name and original.
installed: dict[str, list[tuple[Any, str, Any]]] = {}
_lock = threading.RLock()
_users: dict[str, int] = {}
# Groups that `install` has installed, which stay until `remove`.
_lasting: set[str] = set()


def install(group: str) -> None:
    """Installs a group of patches until `remove`; later calls do nothing."""
    if group in _lasting:
        return
    with _lock:
        _add(group)
        _lasting.add(group)


def remove(group: str) -> None:
    """Removes a group of patches, once no block of `installed_while` uses it."""
    with _lock:
        _lasting.discard(group)
        _remove_unused(group)


def _add(group: str) -> None:
    if group not in installed:
        installed[group] = [_replace(*row) for row in _replacements(group)]


def _remove_unused(group: str) -> None:
    if group in installed and not _users.get(group) and group not in _lasting:
        for owner, name, original in reversed(installed.pop(group)):
            setattr(owner, name, original)


@contextlib.contextmanager
def installed_while(*groups: str) -> Iterator[None]:
    """Installs groups of patches for a block of code, in any number of threads."""
    begin_use(groups)
    try:
        yield
    finally:
        end_use(groups)


def begin_use(groups: tuple[str, ...]) -> None:
    """Installs groups of patches until as many calls of `end_use`.

    Only the outermost of nested uses replaces attributes.
    """
    if not groups:
        return
    with _lock:
        for group in groups:
            _users[group] = _users.get(group, 0) + 1
            _add(group)


def end_use(groups: tuple[str, ...]) -> None:
    """Ends a use that `begin_use` began."""
    if not groups:
        return
    with _lock:
        for group in reversed(groups):
            _users[group] -= 1
            _remove_unused(group)


def wrap_original(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    """Replaces an attribute of Keras for good, underneath a patch that is installed."""
    with _lock:
        for group, rows in installed.items():
            for i, (of, patched, _) in enumerate(rows):
                if of is owner and patched == name:
                    rows[i] = owner, name, wrapped
                    around = _replacements(group)[i][2]
                    setattr(owner, name, _wrapped(wrapped, around))
                    return
        setattr(owner, name, wrapped)


def original_of(owner: Any, name: str) -> Any:
    """An attribute of Keras without a patch that is installed."""
    for rows in installed.values():
        for of, patched, original in rows:
            if of is owner and patched == name:
                return original
    return vars(owner)[name]


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """A block of code in which other threads install and remove no patches."""
    with _lock:
        yield


def is_installed(group: str) -> bool:
    return group in installed


def uninstall() -> None:
    """Removes all patches, for tests."""
    with _lock:
        for group in reversed(list(installed)):
            remove(group)


@functools.cache
def is_present(patch: Patch) -> bool:
    """Whether the backend and the version of Keras have the patched attribute.

    Raises:
        BackendError: for a version of Keras that is not supported.
    """
    backends = patch.backend.split(" | ")
    is_of_backend = not patch.backend or keras.backend.backend() in backends
    return is_of_backend and supported_version() in patch.versions


def supported_version() -> str:
    """The version of Keras, such as `"3.15"`.

    Raises:
        BackendError: for one that the manifest does not list: nothing could be
            replaced in it, and models would train without their strategy.
    """
    version = ".".join(keras.__version__.split(".")[:2])
    if version not in VERSIONS:
        raise BackendError(
            f"Keras {keras.__version__} is installed. Strategies replace parts of it "
            f"that change between versions, and support {' and '.join(VERSIONS)}. "
            f"Install one of them (`pip install 'keras=={VERSIONS[0]}.*'`), or a "
            "newer keras-strategies."
        )
    return version


@functools.cache
def owner_of(patch: Patch) -> Any:
    """The class or module that a patch changes.

    Raises:
        AttributeError: if it has moved.
    """
    names = patch.owner.format(backend=keras.backend.backend()).split(" | ")
    found = [resolved(name) for name in names]
    owners = [each for each in found if each and patch.name in vars(each)]
    if not owners:
        raise AttributeError(
            f"Keras {keras.__version__} has no attribute {patch.name!r} of "
            f"{patch.owner!r}, which keras_compat/manifest.py replaces."
        )
    return owners[0]


def resolved(path: str) -> Any:
    """The object with a full name; None if there is none."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(resolved(parent), name, None) if parent else None


@functools.cache
def _replacements(group: str) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The owners, names and functions of a group's patches for this version."""
    return [
        (owner_of(patch), patch.name, function_of(patch))
        for patch in GROUPS[group].patches
        if is_present(patch)
    ]


def _replace(owner: Any, name: str, around: Callable[..., Any]) -> tuple[Any, str, Any]:
    original = vars(owner)[name]
    setattr(owner, name, _wrapped(original, around))
    return owner, name, original


@functools.cache
def function_of(patch: Patch) -> Callable[..., Any]:
    """The function that replaces the patched one."""
    module, _, name = patch.around.rpartition(".")
    package = importlib.import_module(f"{__package__}.{module}")
    found: Callable[..., Any] = getattr(package, name)
    return found


@functools.cache
def _wrapped(original: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapper
