"""Archives that are damaged, or well formed with right checksums, and hostile."""

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


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_members(path: Path, members: dict[str, bytes], compression: int = 0) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _changed(
    name: str, make: Callable[[bytes], bytes], compression: int = 0
) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        members = members_of(path)
        members[name] = make(members[name])
        write_members(path, members, compression)

    return change


def _header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    file = io.BytesIO()
    given = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, given)
    return file.getvalue()


def _written_header(text: str) -> bytes:
    size = len(text) + 1
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.encode() + b"\n"


def _array(make: Callable[[], bytes]) -> Callable[[Path], None]:
    return _changed(_ARRAY, lambda _: make())


def _json(make: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(data: bytes) -> bytes:
        return json.dumps(make(json.loads(data))).encode()

    return _changed(_CONTENTS, change)


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A JSON value with another one in the place of each that is equal."""
    if value == old:
        return new
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    return value


def _replacing(old: Any, new: Any) -> Callable[[Path], None]:
    return _json(lambda contents: _replaced(contents, old, new))


def _nested(data: bytes) -> bytes:
    """Brackets that JSON reads, in more than Python's recursions."""
    text = json.dumps({**json.loads(data), "state": None}).encode()
    return text.replace(b"null", b"[" * 900 + b"]" * 900)


def _pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    return file.getvalue()


def _encrypted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # The flags of the members, and of their entries in the directory.
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(re.escape(mark), bytes(data)):
            data[found.start() + place] |= 1
    path.write_bytes(data)


_FIRST = {"array": 0}

#: Changes of an archive, by name: what they do, and what the error names.
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a member that expands": (
        _changed(
            _ARRAY,
            lambda _: _header((BOMB_BYTES // 4,)) + bytes(BOMB_BYTES),
            zipfile.ZIP_DEFLATED,
        ),
        r"arrays/0\.npy is compressed",
    ),
    "contents that expand": (
        _changed(_CONTENTS, lambda c: c + b" " * BOMB_BYTES, zipfile.ZIP_DEFLATED),
        r"is compressed",
    ),
    **{
        name: (_array(make), r"arrays/0\.npy")
        for name, make in {
            "4 TB": lambda: _header((1 << 40,)) + bytes(64),
            "more than int64": lambda: _header((1 << 70, 0)),
            "negative": lambda: _header((-1, -4)) + bytes(16),
            "100 dimensions": lambda: _header((1,) * 100) + bytes(4),
            "a large item": lambda: _header((0,), "V900000000"),
            "brackets in a header": lambda: _written_header("(" * 9000),
            "pickled": _pickled,
        }.items()
    },
    **{
        name: (_replacing(_FIRST, _FIRST | {"dtype": dtype}), text)
        for name, dtype, text in (
            ("another attribute", "__loader__", "no dtype '__loader__'"),
            ("another function", "finfo", "no dtype 'finfo'"),
            ("other bits", "bfloat16", r"arrays/0\.npy: its bits"),
        )
    },
    "used twice": (_replacing({"array": 1}, _FIRST), "used twice"),
    "a member that is missing": (
        _replacing(_FIRST, {"array": 10**6}),
        r"arrays/1000000\.npy",
    ),
    "no number": (
        _replacing(_FIRST, {"array": "../../0"}),
        r"contents\.json.*'?\.\./\.\./0'? is not a number",
    ),
    "brackets": (_changed(_CONTENTS, lambda _: b"[" * 100_000), r"contents\.json"),
    "nested": (_changed(_CONTENTS, _nested), ""),
    "a list": (_json(lambda c: [c]), r"contents\.json"),
    **{
        name: (_json(lambda c, state=state: c | {"state": state}), text)
        for name, state, text in (
            ("another structure", {"call": []}, "no structure 'call'"),
            ("keys that are lists", {"dict": [[[], 1]]}, r"contents\.json"),
            ("no state", {"dict": []}, "is missing"),
        )
    },
    "encrypted": (_encrypted, "encrypted"),
}


def _bytes(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(make(path.read_bytes())) and None


def _flipped(data: bytes) -> bytes:
    """One bit of an array is another."""
    place = data.index(b"NUMPY") + 130
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_bytes(lambda data: data[: len(data) // 2]), ""),
    "empty": (_bytes(lambda data: b""), ""),
    "one bit": (_bytes(_flipped), ""),
}
