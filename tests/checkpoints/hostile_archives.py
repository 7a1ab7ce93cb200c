"""Archives that are well formed, with right checksums, and hostile."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

#: Bytes that a member expands to, far more than the archives have.
BOMB_BYTES = 64 << 20
_ARRAY = "arrays/0.npy"
_CONTENTS = "contents.json"


def _members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write(path: Path, members: dict[str, bytes], compression: int = 0) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    file = io.BytesIO()
    given = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, given)
    return file.getvalue()


def _written_header(text: str) -> bytes:
    size = len(text) + 1
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.encode() + b"\n"


def _with_array(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        members = _members(path)
        members[_ARRAY] = make(members[_ARRAY])
        _write(path, members)

    return change


def _with_contents(make: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        members = _members(path)
        members[_CONTENTS] = json.dumps(make(json.loads(members[_CONTENTS]))).encode()
        _write(path, members)

    return change


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A JSON value with another one in the place of each that is equal."""
    if value == old:
        return new
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    return value


def _bomb(path: Path) -> None:
    members = _members(path)
    members[_ARRAY] = _header((BOMB_BYTES // 4,)) + bytes(BOMB_BYTES)
    _write(path, members, zipfile.ZIP_DEFLATED)


def _contents_bomb(path: Path) -> None:
    members = _members(path)
    members[_CONTENTS] += b" " * BOMB_BYTES
    _write(path, members, zipfile.ZIP_DEFLATED)


def _brackets(path: Path) -> None:
    members = _members(path)
    members[_CONTENTS] = b"[" * 100_000
    _write(path, members)


def _nested(path: Path) -> None:
    """Brackets that JSON reads, in more than Python's recursions."""
    members = _members(path)
    state = b"[" * 900 + b"]" * 900
    contents = json.loads(members[_CONTENTS])
    text = json.dumps({**contents, "state": None}).encode()
    members[_CONTENTS] = text.replace(b"null", state)
    _write(path, members)


def _encrypted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # The flags of the members, and of their entries in the directory.
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(re.escape(mark), bytes(data)):
            data[found.start() + place] |= 1
    path.write_bytes(data)


def _pickled(path: Path) -> None:
    members = _members(path)
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    members[_ARRAY] = file.getvalue()
    _write(path, members)


_FIRST = {"array": 0}

#: Changes of an archive, by name: what they do, and what the error names.
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a member that expands": (_bomb, r"arrays/0\.npy is compressed"),
    "contents that expand": (_contents_bomb, r"is compressed"),
    "4 TB": (_with_array(lambda _: _header((1 << 40,)) + bytes(64)), r"arrays/0\.npy"),
    "more than int64": (_with_array(lambda _: _header((1 << 70, 0))), r"arrays/0\.npy"),
    "negative": (
        _with_array(lambda _: _header((-1, -4)) + bytes(16)),
        r"arrays/0\.npy",
    ),
    "100 dimensions": (
        _with_array(lambda _: _header((1,) * 100) + bytes(4)),
        r"arrays/0\.npy",
    ),
    "a large item": (_with_array(lambda _: _header((0,), "V900000000")), r"arrays/0"),
    "brackets in a header": (
        _with_array(lambda _: _written_header("(" * 9000)),
        r"arrays/0\.npy",
    ),
    "pickled": (_pickled, r"arrays/0\.npy"),
    "another attribute": (
        _with_contents(
            lambda c: _replaced(c, _FIRST, _FIRST | {"dtype": "__loader__"})
        ),
        "no dtype '__loader__'",
    ),
    "another function": (
        _with_contents(lambda c: _replaced(c, _FIRST, _FIRST | {"dtype": "finfo"})),
        "no dtype 'finfo'",
    ),
    "other bits": (
        _with_contents(lambda c: _replaced(c, _FIRST, _FIRST | {"dtype": "bfloat16"})),
        r"arrays/0\.npy: its bits",
    ),
    "used twice": (
        _with_contents(lambda c: _replaced(c, {"array": 1}, _FIRST)),
        "used twice",
    ),
    "a member that is missing": (
        _with_contents(lambda c: _replaced(c, _FIRST, {"array": 10**6})),
        r"arrays/1000000\.npy",
    ),
    "no number": (
        _with_contents(lambda c: _replaced(c, _FIRST, {"array": "../../0"})),
        r"contents\.json.*'?\.\./\.\./0'? is not a number",
    ),
    "brackets": (_brackets, r"contents\.json"),
    "nested": (_nested, ""),
    "a list": (_with_contents(lambda c: [c]), r"contents\.json"),
    "another structure": (
        _with_contents(lambda c: c | {"state": {"call": []}}),
        "no structure 'call'",
    ),
    "keys that are lists": (
        _with_contents(lambda c: c | {"state": {"dict": [[[], 1]]}}),
        r"contents\.json",
    ),
    "no state": (_with_contents(lambda c: c | {"state": {"dict": []}}), "is missing"),
    "encrypted": (_encrypted, "encrypted"),
}
