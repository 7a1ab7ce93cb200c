"""Which layers of Keras and which functions of `keras.ops` are split, on each backend.

KERAS_BACKEND=torch PYTHONPATH=tests python -m row_proofs.keras_table

writes what is so on a backend to `keras_table.json`, and the page of the docs, which
`test_keras_table.py` compares with the code.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_proofs import RowProofs
from row_proofs.keras_functions import FUNCTIONS
from row_proofs.keras_layers import LAYERS, Called, case_of
from row_proofs.proofs import built, prover
from row_proofs.row_case import BATCH, SIZES, RowCase

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "contributors" / "split-calls.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
BACKENDS = {"torch": "Torch", "tensorflow": "TensorFlow"}
#: By type, by its operations, not split since rows mix by definition, not split though
#: they could be, and not possible in Keras on this backend.
TYPE, PROVED, MIXES, UNKNOWN, REFUSED = "type", "proved", "mixes", "unknown", "refused"
_MEANINGS = {
    TYPE: "known by type",
    PROVED: "proved by their operations",
    MIXES: "never split: a row of the result depends on others, by definition",
    UNKNOWN: "not split: they call the framework, read values or have no rule",
    REFUSED: "refused by Keras on this backend",
}


def cases(kind: str) -> dict[str, RowCase]:
    if kind == "layers":
        return {name: case_of(name) for name in sorted(LAYERS)}
    return {name: FUNCTIONS[name].case(name) for name in sorted(FUNCTIONS)}


def _mixes(kind: str, name: str) -> bool:
    return (LAYERS if kind == "layers" else FUNCTIONS)[name].mixes


def verdict(kind: str, name: str, case: RowCase) -> str:
    """How the call of a case is treated on the backend under test."""
    keras.utils.set_random_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer, values = built(case)
        except Exception:  # Of Keras, with one of many types.
            return REFUSED
        problem, by_type = _proof(layer, values)
    if problem is None:
        return TYPE if by_type else PROVED
    if _mixes(kind, name):
        return MIXES
    return UNKNOWN


def _proof(layer: Any, values: Sequence[Any]) -> tuple[str | None, bool]:
    """The problem of a call, and whether the layer is known by its type."""
    tensors = tuple(map(keras.ops.convert_to_tensor, values))
    kwargs = {"training": True}
    leaves = argument_leaves(tensors, kwargs)
    call = LayerCall(layer, layer.__call__, (tensors, kwargs), leaves, BATCH)
    proofs = RowProofs(prover(), lambda layer, proof: "", True, contextlib.nullcontext)
    has_rows = [True] * len(tensors)
    found, _ = proofs.of(call, [*has_rows, False], SIZES)
    by_type = found.is_by_type
    if isinstance(layer, Called) and found.problem is None:
        by_type = _is_known(layer.inner, tensors)
    return found.problem, by_type


def _is_known(inner: Any, tensors: Sequence[Any]) -> bool:
    from keras_strategies.keras_compat.models.row_wise_layers import is_row_wise

    return is_row_wise(inner, [len(tensor.shape) for tensor in tensors])


def current() -> dict[str, dict[str, str]]:
    """The verdicts of all cases on the backend under test."""
    return {
        kind: {name: verdict(kind, name, case) for name, case in cases(kind).items()}
        for kind in ("layers", "functions")
    }


# The page.


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def page_text(results: Mapping[str, Any]) -> str:
    """The generated part of the page."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    titles = {"layers": "Layers", "functions": "Functions of `keras.ops`"}
    for kind, title in titles.items():
        yield f"## {title}\n"
        yield "| | " + " | ".join(BACKENDS.values()) + " |"
        yield "|---|" + "---:|" * len(BACKENDS)
        for each, meaning in _MEANINGS.items():
            counts = [
                sum(v == each for v in results[backend][kind].values())
                for backend in BACKENDS
            ]
            if any(counts):
                yield f"| {meaning} | " + " | ".join(map(str, counts)) + " |"
        yield ""
        for backend, label in BACKENDS.items():
            for each in (UNKNOWN, MIXES, REFUSED):
                names = _named(results[backend][kind], each)
                if names:
                    yield f"**{label}, {_MEANINGS[each]}:** {names}.\n"
        by_type = {b: _named(results[b][kind], TYPE) for b in BACKENDS}
        for backend, names in by_type.items():
            if names and (backend == "torch" or names != by_type["torch"]):
                yield f"**{BACKENDS[backend]}, {_MEANINGS[TYPE]}:** {names}.\n"
        for backend, label in BACKENDS.items():
            names = _named(results[backend][kind], PROVED)
            yield f"**{label}, {_MEANINGS[PROVED]}:** {names}.\n"


def _named(verdicts: Mapping[str, str], wanted: str) -> str:
    return ", ".join(f"`{n}`" for n, v in sorted(verdicts.items()) if v == wanted)


def with_table(text: str, table: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}{END}{after}"


def main() -> None:
    results = read() if RESULTS.exists() else {}
    results[keras.backend.backend()] = current()
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    with contextlib.suppress(KeyError):  # Until both backends have run.
        PAGE.write_text(with_table(PAGE.read_text(), page_text(results)))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(4)
    main()
