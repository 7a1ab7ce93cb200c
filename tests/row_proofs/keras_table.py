"""A call with rows of every layer of Keras, and which layers and functions are split.

KERAS_BACKEND=torch PYTHONPATH=tests python -m row_proofs.keras_table

writes what is so on a backend to `keras_table.json`, and the page of the docs, which
`test_keras_table.py` compares with the code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
from keras import layers, ops
from random_numbers.cases import image_layers as augmentations
from random_numbers.cases import more_image_layers

from keras_strategies.rows.row_proofs import RowProofs
from row_proofs import proofs as own
from row_proofs.keras_functions import FUNCTIONS, IMAGE
from row_proofs.proofs import Make, RowCase, integers, mixing, rows

#: Bases, and layers of one framework that hold a program of the user's.
_BASES = "FlaxLayer InputLayer JaxLayer Layer TFSMLayer TorchModuleWrapper Wrapper"
WITHOUT_EXAMPLE = frozenset(_BASES.split())
VECTOR, SEQUENCE, VOLUME = (6,), (5, 4), (4, 4, 4, 2)
WORDS = ["a", "b", "c"]
PAIR: Any = {"on": [VECTOR, VECTOR], "call": lambda layer, x, y: layer([x, y])}
TEXT, TEXTS = own.Argument((), "string"), own.Argument((2,), "string")


def each(
    names: str, *arguments: Any, on: Any = VECTOR, call: Any = None, **options: Any
) -> dict[str, RowCase]:
    """Layers with the same arguments, of a shape or a list of shapes without rows.

    They are called by a function of the layer and its inputs.
    """
    found, shapes = {}, on if isinstance(on, list) else [on]
    for name in names.split():
        make: Any = functools.partial(getattr(layers, name), *arguments, **options)
        held = functools.partial(lambda make: own.Held(make(), call), make)
        found[name] = rows(held if call else make, *shapes)
    return found


def around(name: str, inner: Make, on: Any = SEQUENCE) -> dict[str, RowCase]:
    return {name: rows(lambda: getattr(layers, name)(inner()), on)}


def attend(attention: Any, x: Any) -> Any:
    return attention(x, x, use_causal_mask=True)


VECTORS = {
    **each("BatchNormalization ELU Identity LayerNormalization LeakyReLU PReLU"),
    **each("RMSNormalization ReLU Softmax UnitNormalization"),
    **each("Activation", "gelu"),
    **each("ActivityRegularization", 0.1),
    **each("AlphaDropout Dropout GaussianDropout GaussianNoise", 0.3),
    **each("Dense", 3, "relu"),
    **each("EinsumDense", "ab,bc->ac", 3),
    **each("Lambda", lambda x: ops.square(x)),
    **each("Normalization", mean=0.5, variance=2.0),
    **each("RepeatVector", 3),
    **each("Reshape", (2, 3)),
    **around("SpectralNormalization", lambda: layers.Dense(3), on=VECTOR),
    **each("Add Average Concatenate Maximum Minimum Multiply Subtract", **PAIR),
    **each("Dot", 1, **PAIR),
}

SEQUENCES = {
    **each("Flatten Masking", on=SEQUENCE),
    **each("GroupNormalization", 2, on=SEQUENCE),
    **each("Permute", (2, 1), on=SEQUENCE),
    **each("GRU LSTM SimpleRNN", 3, on=SEQUENCE),
    **each("Embedding ReversibleEmbedding", 9, 4, on=integers(5)),
    **around("Bidirectional", lambda: layers.LSTM(3)),
    **around("RNN", lambda: layers.LSTMCell(3)),
    **around("TimeDistributed", lambda: layers.Dense(3)),
    **each("GRUCell SimpleRNNCell", 3, call=lambda cell, x: cell(x, [x[:, :3]])[0]),
    **each("LSTMCell", 3, call=lambda cell, x: cell(x, [x[:, :3]] * 2)[0]),
    "StackedRNNCells": rows(
        lambda: own.Held(
            layers.StackedRNNCells([layers.GRUCell(3), layers.GRUCell(3)]),
            lambda layer, x: layer(x, [x[:, :3], x[:, 3:]])[0],
        )
    ),
    **each("Attention AdditiveAttention", on=SEQUENCE, call=lambda f, x: f([x, x])),
    **each("MultiHeadAttention", 2, 3, on=SEQUENCE, call=attend),
    **each("GroupQueryAttention", 2, 2, 1, on=SEQUENCE, call=lambda f, x: f(x, x)),
    **each("STFTSpectrogram", frame_length=8, frame_step=4, on=(32, 1)),
    "MelSpectrogram": mixing(
        lambda: layers.MelSpectrogram(16, 8, None, "hann", 64, 4, 1, 30), (64,)
    ),
}


_POSITIONS: dict[str, tuple[Any, ...]] = {
    "AdaptiveAveragePooling AdaptiveMaxPooling AveragePooling": (2,),
    "Conv SeparableConv": (3, 2),
    "Cropping ZeroPadding": (1,),
    "GlobalAveragePooling GlobalMaxPooling": (),
    "MaxPooling UpSampling DepthwiseConv": (2,),
    "SpatialDropout": (0.3,),
}


_VIDEOS = {"1D": (3, 6, 2), "2D": (3, 6, 6, 2), "3D": (2, 4, 4, 4, 2)}


def _of_axes() -> dict[str, RowCase]:
    found = {}
    for axes, shape in {"1D": SEQUENCE, "2D": IMAGE, "3D": VOLUME}.items():
        found |= each(f"Conv{axes}Transpose", 3, 2, on=shape)
        found |= each(f"ConvLSTM{axes}", 2, 2, on=_VIDEOS[axes])
        for names, arguments in _POSITIONS.items():
            every = [name + axes for name in names.split()]
            known = [name for name in every if hasattr(layers, name)]
            found |= each(" ".join(known), *arguments, on=shape)
    return found


def of_boxes(layer: Any, x: Any, boxes: Any, labels: Any) -> Any:
    given = {"images": x, "bounding_boxes": {"boxes": boxes, "labels": labels}}
    return layer(given)["images"]


def pipeline() -> layers.Layer:
    return layers.Pipeline([layers.Rescaling(0.5), layers.CenterCrop(4, 4)])


_CLAHE = "ContrastLimitedAdaptiveHistogramEqualization"
BOXES: Any = {"on": [IMAGE, (5, 4), integers(5)], "call": of_boxes}


def _of_images() -> dict[str, RowCase]:
    found = {
        name: rows(make, IMAGE)
        for name, make in {**augmentations(), **more_image_layers()}.items()
        # Others are models of several layers.
        if hasattr(layers, name)
    }
    scale: Any = {"value_range": (0, 1), "on": IMAGE}
    return found | {
        "MixUp": mixing(lambda: layers.MixUp(seed=1), IMAGE),
        "CutMix": mixing(found["CutMix"].make, IMAGE),
        **each("AutoContrast Equalization", **scale),
        **each("CenterCrop Resizing", 4, 4, on=IMAGE),
        **each(_CLAHE, tile_grid_size=(2, 2), **scale),
        **each("MaxNumBoundingBoxes", 3, bounding_box_format="xyxy", **BOXES),
        **each("Rescaling", 0.5, on=IMAGE),
        **each("Solarization", 0.1, **scale),
        "Pipeline": rows(pipeline, IMAGE),
    }


LOOKUPS = {
    **each("CategoryEncoding Hashing", 5, on=integers(6)),
    **each("Discretization", bin_boundaries=[0.0, 1.0]),
    **each("HashedCrossing", 5, on=[integers(1)] * 2, call=PAIR["call"]),
    **each("IntegerLookup", vocabulary=[1, 2, 3], on=integers(6)),
    **each("StringLookup", vocabulary=WORDS, on=TEXTS),
    **each("TextVectorization", vocabulary=WORDS, output_sequence_length=3, on=TEXT),
}

LAYERS = {**VECTORS, **SEQUENCES, **_of_axes(), **_of_images(), **LOOKUPS}


def layers_of_keras() -> set[str]:
    """The names of Keras's layers, each class once."""
    names: dict[Any, str] = {}
    for name, value in vars(layers).items():
        if isinstance(value, type) and issubclass(value, layers.Layer):
            known = names.get(value, name)
            names[value] = name if name == value.__name__ else known
    return set(names.values())


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
    with warnings.catch_warnings(action="ignore"):
        try:
            layer, values = own.built(case)
        except Exception:  # Of Keras, with one of many types.
            return REFUSED
        call = own.call_of(layer, values)
        proofs = RowProofs(own.prover(), lambda *_: "", True, contextlib.nullcontext)
        proof, _ = proofs.of(call, [*case.has_rows, False], own.SIZES)
    if proof.problem is not None:
        return MIXES if case.problem else UNKNOWN
    is_held = isinstance(layer, own.Held)
    ranks = [value.ndim for value in values]
    by_type = is_row_wise(layer.held, ranks) if is_held else proof.is_by_type
    return TYPE if by_type else PROVED


def read() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text()))


def _named(verdicts: Mapping[str, str], wanted: str) -> str:
    return ", ".join(f"`{n}`" for n, v in sorted(verdicts.items()) if v == wanted)


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    for kind, title in ("layers", "Layers"), ("functions", "Functions of `keras.ops`"):
        yield f"## {title}\n"
        yield "| | " + " | ".join(BACKENDS.values()) + " |"
        yield "|---|" + "---:|" * len(BACKENDS)
        for each, meaning in _MEANINGS.items():
            counts = [[*results[b][kind].values()].count(each) for b in BACKENDS]
            if any(counts):
                yield f"| {meaning} | " + " | ".join(map(str, counts)) + " |"
        yield ""
        of_torch = _named(results["torch"][kind], TYPE)
        for every in (UNKNOWN, MIXES, REFUSED), (TYPE,), (PROVED,):
            for (backend, label), each in itertools.product(BACKENDS.items(), every):
                names = _named(results[backend][kind], each)
                is_known = (each, names) == (TYPE, of_torch) and backend != "torch"
                if names and not is_known:
                    yield f"**{label}, {_MEANINGS[each]}:** {names}.\n"


def with_table(text: str, results: Mapping[str, Any]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(_lines(results))
    return f"{before}{BEGIN}{table}\n{END}{after}"


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(4)
    found = read() if RESULTS.exists() else {}
    found[keras.backend.backend()] = {
        kind: {name: verdict(cases[name]) for name in sorted(cases)}
        for kind, cases in CASES.items()
    }
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    with contextlib.suppress(KeyError):  # Until both backends have run.
        PAGE.write_text(with_table(PAGE.read_text(), found))
