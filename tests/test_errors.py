"""The last line of an error: the command that prints its entry."""

from __future__ import annotations

import pickle
import subprocess
import threading

import cloudpickle
import pytest

import keras_strategies as ks
from keras_strategies.processes.portable_exceptions import PortableException
from keras_strategies.tools import cli

pytestmark = pytest.mark.one_backend("jax")

CLASSES = [value for value in vars(ks.errors).values() if isinstance(value, type)]


def command_of(error: BaseException) -> str:
    last = str(error).splitlines()[-1]
    assert last.startswith("See `keras-strategies explain "), last
    return last.split("`")[1]


@pytest.mark.parametrize("cls", CLASSES)
def test_the_command_explains_the_error(cls, capsys) -> None:
    _, *arguments = command_of(cls("something")).split()
    assert cli.main(arguments) == 0
    title, rule, *lines = capsys.readouterr().out.splitlines()
    assert title == cls.__name__
    assert len(lines) > 1 and max(map(len, lines)) <= len(rule)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_one_command_follows_the_message_in_other_processes_too(pickler) -> None:
    error = ks.errors.BatchError("No rows.")
    for _ in range(3):
        assert str(error) == "No rows.\nSee `keras-strategies explain BatchError`"
        assert error.text == "No rows."
        assert error.args == ("No rows.",)
        assert str(sent(error)) == str(error)
        error = pickler.loads(pickler.dumps(error))


def test_an_error_defined_elsewhere_has_the_entry_of_its_base() -> None:
    class OwnError(ks.errors.LayoutError):
        pass

    assert command_of(OwnError("")) == "keras-strategies explain LayoutError"


def sent(error: Exception) -> Exception:
    """The error as another process receives it."""
    message = pickle.loads(pickle.dumps(PortableException.of(error, "on worker 1")))
    return message.error()


class _Coded(Exception):
    def __init__(self, code: int, *, lock: object = None):
        super().__init__(f"code {code}")
        self.code, self.lock = code, lock


class _Missing(FileNotFoundError):
    def __init__(self, path: str, *, kind: str):
        super().__init__(2, "not there", path)
        self.kind = kind


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [
        _Coded(3),
        _Coded(3, lock=threading.Lock()),
        _Missing("/x", kind="table"),
        KeyError("a"),
        subprocess.CalledProcessError(3, "ls"),
        UnicodeDecodeError("utf8", b"a", 0, 1, "reason"),
        ExceptionGroup("two", [_Coded(1), ValueError("x")]),
        ks.errors.BatchError("No rows."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_with_class_text_and_attributes(error) -> None:
    found = sent(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    for name in ("code", "kind", "filename", "errno", "returncode"):
        assert getattr(found, name, None) == getattr(error, name, None)
    assert any(note.startswith("Raised on worker 1:") for note in found.__notes__)


def test_errors_without_text_and_of_unknown_classes_arrive() -> None:
    assert type(sent(_Unprintable())) is _Unprintable
    message = PortableException(b"not a pickle", "Unknown: the reason", "Raised there")
    found = message.error(ks.errors.PeerError)
    assert isinstance(found, ks.errors.PeerError)
    assert found.text == "Unknown: the reason"
