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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_strategies.rows.row_proofs import RowProofs
from row_proofs.case_layers import SIZES, Held, RowCase
from row_proofs.keras_functions import FUNCTIONS
from row_proofs.keras_layers import LAYERS
from row_proofs.proofs import built, call_of, prover

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "contributors" / "split-calls.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
BACKENDS = {"torch": "Torch", "tensorflow": "TensorFlow"}
CASES = {"layers": LAYERS, "functions": FUNCTIONS}
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


def verdict(case: RowCase) -> str:
    """How the call of a case is treated on the backend under test."""
    from keras_strategies.keras_compat.models.row_wise_layers import is_row_wise

    keras.utils.set_random_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer, values = built(case)
        except Exception:  # Of Keras, with one of many types.
            return REFUSED
        call = call_of(layer, values)
        proofs = RowProofs(prover(), lambda *_: "", True, contextlib.nullcontext)
        proof, _ = proofs.of(call, [*case.has_rows, False], SIZES)
    if proof.problem is not None:
        return MIXES if case.problem else UNKNOWN
    by_type = proof.is_by_type
    if isinstance(layer, Held):
        by_type = is_row_wise(layer.held, [value.ndim for value in values])
    return TYPE if by_type else PROVED


def current() -> dict[str, dict[str, str]]:
    """The verdicts of all cases on the backend under test."""
    return {
        kind: {name: verdict(cases[name]) for name in sorted(cases)}
        for kind, cases in CASES.items()
    }


def read() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text()))


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    titles = {"layers": "Layers", "functions": "Functions of `keras.ops`"}
    for kind, title in titles.items():
        yield f"## {title}\n"
        yield "| | " + " | ".join(BACKENDS.values()) + " |"
        yield "|---|" + "---:|" * len(BACKENDS)
        for each, meaning in _MEANINGS.items():
            counts = [[*results[b][kind].values()].count(each) for b in BACKENDS]
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


def with_table(text: str, results: Mapping[str, Any]) -> str:
    """The page with what is generated of the results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(_lines(results))
    return f"{before}{BEGIN}{table}\n{END}{after}"


def main() -> None:
    results = read() if RESULTS.exists() else {}
    results[keras.backend.backend()] = current()
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    with contextlib.suppress(KeyError):  # Until both backends have run.
        PAGE.write_text(with_table(PAGE.read_text(), results))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(4)
    main()
