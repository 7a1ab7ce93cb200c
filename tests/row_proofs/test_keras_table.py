"""The page of layers and functions that are split says what the code does."""

from __future__ import annotations

import keras
import pytest

from row_proofs import keras_functions, keras_table
from row_proofs.keras_table import PROVED, TYPE
from row_proofs.proofs import BACKEND, assert_parts_equal, built, needs_split, proof_of

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

_LAYERS = """BatchNormalization CategoryEncoding Concatenate Dense Hashing LSTM LSTMCell
    Lambda MixUp MultiHeadAttention RandomContrast Rescaling ReversibleEmbedding"""
_FUNCTIONS = """add angle argpartition bincount cholesky clip conv cross diag einsum
    floor_divide gcd glu heaviside histogram image.resize inner lstsq map nanmax
    nanquantile qr segment_sum slice_update solve sort switch take top_k unique vander
    vectorize view where"""
#: By day each kind of rules and reasons, in calls that are quickly traced.
BY_DAY = {"layers": _LAYERS.split(), "functions": _FUNCTIONS.split()}
#: Undefined entries, and calls that Keras alone cannot differentiate.
WITHOUT_NUMBERS = ("empty_like", *(["vander"] if BACKEND == "torch" else []))
PARAMETERS = [
    pytest.param(kind, n, marks=[] if n in by_day else [pytest.mark.nightly])
    for kind, by_day in BY_DAY.items()
    for n in sorted(keras_table.CASES[kind])
]
_NEW = "column_stack copysign cov float_power gammainc grad lgamma matrix_power"
_NEW += " image.reconstruct_patches"
#: Of Keras 3.16, of which there is no release yet; the page has the rows of a release.
UNRELEASED = {"functions": {*_NEW.split()}, "layers": {"Mosaic", "TernaryDense"}}


def test_every_function_and_layer_has_a_call() -> None:
    functions, layers = set(keras_functions.FUNCTIONS), set(keras_table.LAYERS)
    known = functions | keras_functions.WITHOUT_ROWS
    of_keras = keras_functions.names_of_keras()
    assert known | (UNRELEASED["functions"] & of_keras) == of_keras
    of_keras = keras_table.layers_of_keras()
    # In Keras 3.16 `GroupQueryAttention` is a second name of its class.
    renamed = {getattr(keras.layers, name).__name__ for name in layers - of_keras}
    known = (layers & of_keras) | renamed | keras_table.WITHOUT_EXAMPLE
    assert known | (UNRELEASED["layers"] & of_keras) == of_keras
    for kind, names in BY_DAY.items():
        assert set(names) <= set(keras_table.CASES[kind])


def test_the_page_has_the_results() -> None:
    results = keras_table.read()
    for backend in keras_table.BACKENDS:
        for kind in BY_DAY:
            assert set(results[backend][kind]) == set(keras_table.CASES[kind])
    text = keras_table.PAGE.read_text()
    assert text == keras_table.with_table(text, results)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.slow(seconds=12)
@needs_split
@pytest.mark.parametrize(("kind", "name"), PARAMETERS)
def test_a_call_is_treated_as_the_page_says(kind: str, name: str) -> None:
    case = keras_table.CASES[kind][name]
    found = keras_table.verdict(case)
    assert found == keras_table.read()[BACKEND][kind][name]
    if found not in (PROVED, TYPE) or name in WITHOUT_NUMBERS:
        return
    # Two uneven parts of the batch give its numbers.
    layer, values = built(case)
    proof = proof_of(layer, values, case.has_rows)
    if any(proof.draws) or name == "BatchNormalization" or proof.problem is not None:
        return
    assert_parts_equal(layer, values, proof, case.has_rows)
