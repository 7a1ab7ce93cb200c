"""A call with rows of every layer of `keras.layers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import layers, ops
from random_numbers.cases import image_layers as augmentations
from random_numbers.cases import more_image_layers

from row_proofs.keras_functions import IMAGE, Use, integers, mixing
from row_proofs.row_case import Argument, RowCase, as_argument

#: Bases, and layers of one framework that hold a program of the user's.
_WITHOUT_EXAMPLE = """
    FlaxLayer InputLayer JaxLayer Layer TFSMLayer TorchModuleWrapper Wrapper
"""
WITHOUT_EXAMPLE = frozenset(_WITHOUT_EXAMPLE.split())
_MERGING = "Add Average Concatenate Maximum Minimum Multiply Subtract"
VECTOR, SEQUENCE, VIDEO, VOLUME = (6,), (5, 4), (3, 6, 6, 2), (4, 4, 4, 2)


class Called(layers.Layer):
    """Calls a layer by a function of it and the inputs."""

    def __init__(self, inner: Any, call: Callable[..., Any]):
        super().__init__()
        self.inner, self.own = inner, call

    def call(self, *inputs: Any) -> Any:
        return self.own(self.inner, *inputs)


def use(make: Callable[[], Any], *arguments: Any) -> Use:
    return Use(make, arguments or (VECTOR,))


def called(make: Callable[[], Any], call: Callable[..., Any], *arguments: Any) -> Use:
    return Use(lambda: Called(make(), call), arguments)


def merged(name: str) -> Use:
    kind = getattr(layers, name)
    return called(kind, lambda layer, x, y: layer([x, y]), VECTOR, VECTOR)


def _of_lookups() -> dict[str, Use]:
    words = ["a", "b", "c"]

    return {
        "CategoryEncoding": use(lambda: layers.CategoryEncoding(5), integers(6)),
        "Discretization": use(lambda: layers.Discretization(bin_boundaries=[0.0, 1.0])),
        "HashedCrossing": called(
            lambda: layers.HashedCrossing(5),
            lambda layer, a, b: layer((a, b)),
            integers(1),
            integers(1),
        ),
        "Hashing": use(lambda: layers.Hashing(5), integers(6)),
        "IntegerLookup": use(
            lambda: layers.IntegerLookup(vocabulary=[1, 2, 3]), integers(6)
        ),
        "StringLookup": use(
            lambda: layers.StringLookup(vocabulary=words), Argument((2,), "string")
        ),
        "TextVectorization": use(
            lambda: layers.TextVectorization(
                vocabulary=words, output_sequence_length=3
            ),
            Argument((), "string"),
        ),
    }


def _of_images() -> dict[str, Use]:
    found = {
        name: use(make, IMAGE)
        for name, make in {**augmentations(), **more_image_layers()}.items()
        # Others are models of several layers.
        if hasattr(layers, name)
    }
    found["MixUp"] = mixing(lambda: layers.MixUp(seed=1), IMAGE)
    found["CutMix"] = mixing(found["CutMix"].apply, IMAGE)
    scale = {"value_range": (0, 1)}
    found |= {
        "AutoContrast": use(lambda: layers.AutoContrast(**scale), IMAGE),
        "CenterCrop": use(lambda: layers.CenterCrop(4, 4), IMAGE),
        "ContrastLimitedAdaptiveHistogramEqualization": use(
            lambda: layers.ContrastLimitedAdaptiveHistogramEqualization(
                tile_grid_size=(2, 2), **scale
            ),
            IMAGE,
        ),
        "Equalization": use(lambda: layers.Equalization(**scale), IMAGE),
        "MaxNumBoundingBoxes": called(
            lambda: layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy"),
            lambda layer, x, boxes, labels: layer(
                {"images": x, "bounding_boxes": {"boxes": boxes, "labels": labels}}
            )["images"],
            IMAGE,
            (5, 4),
            integers(5),
        ),
        "Rescaling": use(lambda: layers.Rescaling(0.5), IMAGE),
        "Resizing": use(lambda: layers.Resizing(4, 4), IMAGE),
        "Solarization": use(lambda: layers.Solarization(0.1, **scale), IMAGE),
        "MelSpectrogram": mixing(
            lambda: layers.MelSpectrogram(
                fft_length=16,
                sequence_stride=8,
                num_mel_bins=4,
                sampling_rate=64,
                min_freq=1,
                max_freq=30,
            ),
            (64,),
        ),
        "STFTSpectrogram": use(
            lambda: layers.STFTSpectrogram(frame_length=8, frame_step=4), (32, 1)
        ),
        "Pipeline": use(
            lambda: layers.Pipeline([layers.Rescaling(0.5), layers.CenterCrop(4, 4)]),
            IMAGE,
        ),
    }
    return found


def _of_axes() -> dict[str, Use]:
    """Layers for one, two and three axes of positions."""
    inputs = {1: SEQUENCE, 2: IMAGE, 3: VOLUME}
    found = {}
    for axes, shape in inputs.items():
        for name, arguments in {
            "AdaptiveAveragePooling": (2,),
            "AdaptiveMaxPooling": (2,),
            "AveragePooling": (2,),
            "Conv": (3, 2),
            "ConvTranspose": (3, 2),
            "Cropping": (1,),
            "GlobalAveragePooling": (),
            "GlobalMaxPooling": (),
            "MaxPooling": (2,),
            "SpatialDropout": (0.3,),
            "UpSampling": (2,),
            "ZeroPadding": (1,),
            "DepthwiseConv": (2,),
            "SeparableConv": (3, 2),
        }.items():
            full = f"{name}{axes}D"
            if name == "ConvTranspose":
                full = f"Conv{axes}DTranspose"
            kind = getattr(layers, full, None)
            if kind is not None:
                found[full] = use(
                    lambda kind=kind, given=arguments: kind(*given), shape
                )
    found["ConvLSTM1D"] = use(lambda: layers.ConvLSTM1D(2, 2), (3, 6, 2))
    found["ConvLSTM2D"] = use(lambda: layers.ConvLSTM2D(2, 2), VIDEO)
    found["ConvLSTM3D"] = use(lambda: layers.ConvLSTM3D(2, 2), (2, 4, 4, 4, 2))
    return found


def _of_sequences() -> dict[str, Use]:
    def cell(make: Callable[[], Any], states: int) -> Use:
        return called(
            make,
            lambda layer, x: layer(x, [x[:, :3]] * states)[0],
            VECTOR,
        )

    return {
        "Bidirectional": use(lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE),
        "GRU": use(lambda: layers.GRU(3), SEQUENCE),
        "LSTM": use(lambda: layers.LSTM(3), SEQUENCE),
        "RNN": use(lambda: layers.RNN(layers.LSTMCell(3)), SEQUENCE),
        "SimpleRNN": use(lambda: layers.SimpleRNN(3), SEQUENCE),
        "GRUCell": cell(lambda: layers.GRUCell(3), 1),
        "LSTMCell": cell(lambda: layers.LSTMCell(3), 2),
        "SimpleRNNCell": cell(lambda: layers.SimpleRNNCell(3), 1),
        "StackedRNNCells": called(
            lambda: layers.StackedRNNCells([layers.GRUCell(3), layers.GRUCell(3)]),
            lambda layer, x: layer(x, [x[:, :3], x[:, 3:]])[0],
            VECTOR,
        ),
        "TimeDistributed": use(
            lambda: layers.TimeDistributed(layers.Dense(3)), SEQUENCE
        ),
        "Embedding": use(lambda: layers.Embedding(9, 4), integers(5)),
        "ReversibleEmbedding": use(
            lambda: layers.ReversibleEmbedding(9, 4), integers(5)
        ),
        "Masking": use(layers.Masking, SEQUENCE),
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
    }


def _of_vectors() -> dict[str, Use]:
    def squared(x: Any) -> Any:
        return ops.square(x)

    return {
        "Activation": use(lambda: layers.Activation("gelu")),
        "ActivityRegularization": use(lambda: layers.ActivityRegularization(0.1)),
        "AlphaDropout": use(lambda: layers.AlphaDropout(0.3)),
        "BatchNormalization": use(layers.BatchNormalization),
        "Dense": use(lambda: layers.Dense(3, "relu")),
        "Dropout": use(lambda: layers.Dropout(0.3)),
        "ELU": use(layers.ELU),
        "EinsumDense": use(lambda: layers.EinsumDense("ab,bc->ac", 3)),
        "Flatten": use(layers.Flatten, SEQUENCE),
        "GaussianDropout": use(lambda: layers.GaussianDropout(0.3)),
        "GaussianNoise": use(lambda: layers.GaussianNoise(0.3)),
        "GroupNormalization": use(lambda: layers.GroupNormalization(2), SEQUENCE),
        "Identity": use(layers.Identity),
        "Lambda": use(lambda: layers.Lambda(squared)),
        "LayerNormalization": use(layers.LayerNormalization),
        "LeakyReLU": use(layers.LeakyReLU),
        "Normalization": use(lambda: layers.Normalization(mean=0.5, variance=2.0)),
        "PReLU": use(layers.PReLU),
        "Permute": use(lambda: layers.Permute((2, 1)), SEQUENCE),
        "RMSNormalization": use(layers.RMSNormalization),
        "ReLU": use(layers.ReLU),
        "RepeatVector": use(lambda: layers.RepeatVector(3)),
        "Reshape": use(lambda: layers.Reshape((2, 3))),
        "Softmax": use(layers.Softmax),
        "SpectralNormalization": use(
            lambda: layers.SpectralNormalization(layers.Dense(3))
        ),
        "UnitNormalization": use(layers.UnitNormalization),
        **{name: merged(name) for name in _MERGING.split()},
        "Dot": called(lambda: layers.Dot(1), lambda d, x, y: d([x, y]), (6,), (6,)),
    }


LAYERS: dict[str, Use] = {
    **_of_vectors(),
    **_of_sequences(),
    **_of_axes(),
    **_of_images(),
    **_of_lookups(),
}


def case_of(name: str) -> RowCase:
    """The case of a layer; `apply` makes it."""
    own = LAYERS[name]
    return RowCase(name, own.apply, tuple(map(as_argument, own.arguments)))


def layers_of_keras() -> set[str]:
    """The names of Keras's layers, each class once."""
    names: dict[Any, str] = {}
    for name, value in vars(layers).items():
        if isinstance(value, type) and issubclass(value, layers.Layer):
            own = names.setdefault(value, name)
            names[value] = name if name == value.__name__ else own
    return set(names.values())
