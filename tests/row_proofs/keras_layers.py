"""A call with rows of every layer of `keras.layers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import layers, ops
from random_numbers.cases import image_layers as augmentations
from random_numbers.cases import more_image_layers

from row_proofs.case_layers import Argument, Held, RowCase, integers, mixing, rows
from row_proofs.keras_functions import IMAGE, TWO

#: Bases, and layers of one framework that hold a program of the user's.
_WITHOUT_EXAMPLE = """
    FlaxLayer InputLayer JaxLayer Layer TFSMLayer TorchModuleWrapper Wrapper
"""
WITHOUT_EXAMPLE = frozenset(_WITHOUT_EXAMPLE.split())
VECTOR, SEQUENCE, VIDEO, VOLUME = (6,), (5, 4), (3, 6, 6, 2), (4, 4, 4, 2)
WORDS = ["a", "b", "c"]


def each(names: str, *arguments: Any, on: Any = VECTOR, **options: Any) -> Any:
    """Layers with the same arguments, of a shape without rows."""
    return {
        name: rows(lambda name=name: getattr(layers, name)(*arguments, **options), on)
        for name in names.split()
    }


def called(make: Callable[[], Any], call: Callable[..., Any], *shapes: Any) -> RowCase:
    """A layer that is called by a function of it and the inputs."""
    return rows(lambda: Held(make(), call), *shapes)


def of_pairs(names: str) -> dict[str, RowCase]:
    """Layers that get their two inputs in a list."""
    return {
        name: called(getattr(layers, name), lambda layer, x, y: layer([x, y]), *TWO)
        for name in names.split()
    }


def cell(make: Callable[[], Any], states: int = 1) -> RowCase:
    return called(make, lambda layer, x: layer(x, [x[:, :3]] * states)[0])


def squared(x: Any) -> Any:
    return ops.square(x)


VECTORS = {
    **each("BatchNormalization ELU Identity LayerNormalization LeakyReLU PReLU"),
    **each("RMSNormalization ReLU Softmax UnitNormalization"),
    **each("Activation", "gelu"),
    **each("ActivityRegularization", 0.1),
    **each("AlphaDropout Dropout GaussianDropout GaussianNoise", 0.3),
    **each("Dense", 3, "relu"),
    **each("EinsumDense", "ab,bc->ac", 3),
    **each("Lambda", squared),
    **each("Normalization", mean=0.5, variance=2.0),
    **each("RepeatVector", 3),
    **each("Reshape", (2, 3)),
    "SpectralNormalization": rows(
        lambda: layers.SpectralNormalization(layers.Dense(3))
    ),
    **of_pairs("Add Average Concatenate Maximum Minimum Multiply Subtract"),
    "Dot": called(lambda: layers.Dot(1), lambda d, x, y: d([x, y]), *TWO),
}

SEQUENCES = {
    **each("Flatten Masking", on=SEQUENCE),
    **each("GroupNormalization", 2, on=SEQUENCE),
    **each("Permute", (2, 1), on=SEQUENCE),
    **each("GRU LSTM SimpleRNN", 3, on=SEQUENCE),
    **each("Embedding ReversibleEmbedding", 9, 4, on=integers(5)),
    "Bidirectional": rows(lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE),
    "RNN": rows(lambda: layers.RNN(layers.LSTMCell(3)), SEQUENCE),
    "GRUCell": cell(lambda: layers.GRUCell(3)),
    "LSTMCell": cell(lambda: layers.LSTMCell(3), 2),
    "SimpleRNNCell": cell(lambda: layers.SimpleRNNCell(3)),
    "StackedRNNCells": called(
        lambda: layers.StackedRNNCells([layers.GRUCell(3), layers.GRUCell(3)]),
        lambda layer, x: layer(x, [x[:, :3], x[:, 3:]])[0],
    ),
    "TimeDistributed": rows(lambda: layers.TimeDistributed(layers.Dense(3)), SEQUENCE),
    "Attention": called(layers.Attention, lambda layer, x: layer([x, x]), SEQUENCE),
    "AdditiveAttention": called(
        layers.AdditiveAttention, lambda layer, x: layer([x, x]), SEQUENCE
    ),
    "MultiHeadAttention": called(
        lambda: layers.MultiHeadAttention(2, 3),
        lambda layer, x: layer(x, x, use_causal_mask=True),
        SEQUENCE,
    ),
    "GroupQueryAttention": called(
        lambda: layers.GroupQueryAttention(2, 2, 1),
        lambda layer, x: layer(x, x),
        SEQUENCE,
    ),
    **each("STFTSpectrogram", frame_length=8, frame_step=4, on=(32, 1)),
    "MelSpectrogram": mixing(
        lambda: layers.MelSpectrogram(16, 8, None, "hann", 64, 4, 1, 30), (64,)
    ),
}


def _of_axes() -> dict[str, RowCase]:
    """Layers for one, two and three axes of positions."""
    found = {}
    for axes, shape in {1: SEQUENCE, 2: IMAGE, 3: VOLUME}.items():
        for names, arguments in {
            "AdaptiveAveragePooling AdaptiveMaxPooling AveragePooling": (2,),
            "Conv Conv{}DTranspose SeparableConv": (3, 2),
            "Cropping ZeroPadding": (1,),
            "GlobalAveragePooling GlobalMaxPooling": (),
            "MaxPooling UpSampling DepthwiseConv": (2,),
            "SpatialDropout": (0.3,),
        }.items():
            for name in names.split():
                full = name.format(axes) if "{" in name else f"{name}{axes}D"
                if hasattr(layers, full):
                    found |= each(full, *arguments, on=shape)
    for name, shape in {"1D": (3, 6, 2), "2D": VIDEO, "3D": (2, 4, 4, 4, 2)}.items():
        found |= each(f"ConvLSTM{name}", 2, 2, on=shape)
    return found


def of_boxes(layer: Any, x: Any, boxes: Any, labels: Any) -> Any:
    given = {"images": x, "bounding_boxes": {"boxes": boxes, "labels": labels}}
    return layer(given)["images"]


def _of_images() -> dict[str, RowCase]:
    found = {
        name: rows(make, IMAGE)
        for name, make in {**augmentations(), **more_image_layers()}.items()
        # Others are models of several layers.
        if hasattr(layers, name)
    }
    equalization = "ContrastLimitedAdaptiveHistogramEqualization"
    scale: Any = {"value_range": (0, 1), "on": IMAGE}
    return found | {
        "MixUp": mixing(lambda: layers.MixUp(seed=1), IMAGE),
        "CutMix": mixing(found["CutMix"].make, IMAGE),
        **each("AutoContrast Equalization", **scale),
        **each("CenterCrop Resizing", 4, 4, on=IMAGE),
        **each(equalization, tile_grid_size=(2, 2), **scale),
        "MaxNumBoundingBoxes": called(
            lambda: layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy"),
            of_boxes,
            *[IMAGE, (5, 4), integers(5)],
        ),
        **each("Rescaling", 0.5, on=IMAGE),
        **each("Solarization", 0.1, **scale),
        "Pipeline": rows(
            lambda: layers.Pipeline([layers.Rescaling(0.5), layers.CenterCrop(4, 4)]),
            IMAGE,
        ),
    }


LOOKUPS = {
    **each("CategoryEncoding Hashing", 5, on=integers(6)),
    **each("Discretization", bin_boundaries=[0.0, 1.0]),
    "HashedCrossing": called(
        lambda: layers.HashedCrossing(5),
        lambda layer, a, b: layer((a, b)),
        *[integers(1), integers(1)],
    ),
    **each("IntegerLookup", vocabulary=[1, 2, 3], on=integers(6)),
    **each("StringLookup", vocabulary=WORDS, on=Argument((2,), "string")),
    **each(
        "TextVectorization",
        vocabulary=WORDS,
        output_sequence_length=3,
        on=Argument((), "string"),
    ),
}

LAYERS = {**VECTORS, **SEQUENCES, **_of_axes(), **_of_images(), **LOOKUPS}


def layers_of_keras() -> set[str]:
    """The names of Keras's layers, each class once."""
    names: dict[Any, str] = {}
    for name, value in vars(layers).items():
        if isinstance(value, type) and issubclass(value, layers.Layer):
            own = names.setdefault(value, name)
            names[value] = name if name == value.__name__ else own
    return set(names.values())
