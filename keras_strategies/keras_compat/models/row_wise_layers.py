"""Keras's own layers that compute each row of their outputs from that row of inputs.

Functions and layers that a user passes to them are arguments like others: a layer is
known if its activation, cell or inner layer is.

A layer is in a table by its type and arguments. Its call is then Keras's code, which
these tables were written from (Keras 3.15 and 3.16); `tests/row_proofs` proves each of
them by its operations. Everything else is proved by its operations: layers and
functions of users, operations in functional models, layers with an axis of the rows.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import (
    rematerializes,
    wraps_activation,
)
from keras_strategies.keras_compat.strategy_attribute import STRATEGY_ATTRIBUTE

#: Layers without an argument that could mix rows.
_ROW_WISE = frozenset(
    [
        "AdaptiveAveragePooling1D",
        "AdaptiveAveragePooling2D",
        "AdaptiveAveragePooling3D",
        "AdaptiveMaxPooling1D",
        "AdaptiveMaxPooling2D",
        "AdaptiveMaxPooling3D",
        "Add",
        "Average",
        "AveragePooling1D",
        "AveragePooling2D",
        "AveragePooling3D",
        "Conv1D",
        "Conv1DTranspose",
        "Conv2D",
        "Conv2DTranspose",
        "Conv3D",
        "Conv3DTranspose",
        "Cropping1D",
        "Cropping2D",
        "Cropping3D",
        "Dense",
        "DepthwiseConv1D",
        "DepthwiseConv2D",
        "ELU",
        "Embedding",
        "Flatten",
        "GRUCell",
        "GaussianDropout",
        "GaussianNoise",
        "GlobalAveragePooling1D",
        "GlobalAveragePooling2D",
        "GlobalAveragePooling3D",
        "GlobalMaxPooling1D",
        "GlobalMaxPooling2D",
        "GlobalMaxPooling3D",
        "Identity",
        "InputLayer",
        "LSTMCell",
        "LeakyReLU",
        "MaxPooling1D",
        "MaxPooling2D",
        "MaxPooling3D",
        "Maximum",
        "Minimum",
        "Multiply",
        "PReLU",
        "Permute",
        "ReLU",
        "RepeatVector",
        "ReversibleEmbedding",
        "Reshape",
        "SeparableConv1D",
        "SeparableConv2D",
        "SimpleRNNCell",
        "SpatialDropout1D",
        "SpatialDropout2D",
        "SpatialDropout3D",
        "SpectralNormalization",
        "StackedRNNCells",
        "Subtract",
        "UpSampling1D",
        "UpSampling2D",
        "UpSampling3D",
        "ZeroPadding1D",
        "ZeroPadding2D",
        "ZeroPadding3D",
        "Bidirectional",
    ]
)
#: Operations of functional models that compute each entry from those at its place.
_ELEMENTWISE = frozenset(
    [
        "Absolute",
        "Add",
        "Cast",
        "Divide",
        "Elu",
        "Equal",
        "Erf",
        "Exp",
        "Gelu",
        "Greater",
        "GreaterEqual",
        "HardSigmoid",
        "HardSilu",
        "LeakyRelu",
        "Less",
        "LessEqual",
        "Log",
        "Log1p",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Multiply",
        "Negative",
        "NotEqual",
        "Power",
        "Relu",
        "Relu6",
        "Rsqrt",
        "Sigmoid",
        "Sign",
        "Silu",
        "Softplus",
        "Sqrt",
        "Square",
        "Subtract",
        "Tanh",
        "TrueDivide",
    ]
)
#: Names of classes that Keras exports by another one.
_EXPORTED = {"GroupedQueryAttention": "GroupQueryAttention"}
_RNN = ("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "GRU", "LSTM", "RNN", "SimpleRNN")
#: The module of a cell that Keras does not export.
_CONV_CELL = "keras.src.layers.rnn.conv_lstm"
#: Regularizers that are sums over all entries, which Keras divides by the rows.
_SUMS = ("L1", "L2", "L1L2")
#: Attributes with functions that a call does not use.
_NOT_CALLED = ("initializer", "constraint")
_NOT_CALLED_NAMES = frozenset(
    [
        "bias_regularizer",
        "beta_regularizer",
        "depthwise_regularizer",
        "embeddings_regularizer",
        "gamma_regularizer",
        "alpha_regularizer",
        "kernel_regularizer",
        "pointwise_regularizer",
        "recurrent_regularizer",
    ]
)
#: Functions of `keras.activations` that compute each entry from that at its place.
_ELEMENTWISE_ACTIVATIONS = """
    celu elu exponential gelu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu
    linear log_sigmoid mish relu relu6 selu sigmoid silu soft_shrink softplus softsign
    sparse_plus sparse_sigmoid squareplus tanh tanh_shrink threshold
"""
#: Those along the last axis.
_LAST_AXIS_ACTIVATIONS = frozenset(["glu", "log_softmax", "softmax", "sparsemax"])
#: Names that a user's subclass of a model may define without changing its call.
NAMES_OF_TRAINING = frozenset(
    [
        "__init__",
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
        "build",
        "compile",
        "compile_from_config",
        "compute_loss",
        "compute_metrics",
        "evaluate",
        "fit",
        "from_config",
        "get_compile_config",
        "get_config",
        "loss",
        "make_predict_function",
        "make_test_function",
        "make_train_function",
        "metrics",
        "name",
        "optimizer",
        "predict",
        "predict_on_batch",
        "predict_step",
        "summary",
        "test_on_batch",
        "test_step",
        "train_on_batch",
        "train_step",
    ]
)


def is_row_wise(layer: Any, ranks: Sequence[int]) -> bool:
    """Whether a layer is known to compute each row from that row of its inputs.

    True also says: its outputs have one row for each row of its inputs, losses that it
    adds are means over rows, and its updates are functions of variables and of
    statistics of `BatchNormalization`.

    Args:
        layer: a built `keras.layers.Layer` with a batch axis in all of its inputs.
        ranks: the numbers of axes of its inputs.
    """
    if not isinstance(layer, keras.layers.Layer):
        return False  # A cell of the user's.
    if "call" in vars(layer) or not _has_known_functions(layer, ranks):
        return False
    if layer.non_trainable_variables and rematerializes(layer):
        return False  # Backward passes assign them, too.
    if wraps_activation(layer):
        return False  # Calls of two replicas at once would wrap it twice, for good.
    if layer.quantization_mode not in (None, "int8", "int4"):
        return False  # Scales of float8 are statistics of the batch.
    if _is_container(layer):
        return _is_known_class(layer) and all(map(_is_known, _operations(layer)))
    kind = type(layer)
    name = kind.__name__
    if kind.__module__ == _CONV_CELL and name == "ConvLSTMCell":
        return True
    if getattr(keras.layers, _EXPORTED.get(name, name), None) is not kind:
        return False
    if name not in _ROW_WISE:
        check = _CHECKED.get(name)
        if check is None or not check(layer, ranks):
            return False
    inner, fewer = _inner_layers(layer)
    below = [rank - fewer for rank in ranks]
    return all(is_row_wise(each, below) for each in inner)


def _is_container(layer: Any) -> bool:
    from keras.src.models.functional import Functional

    return isinstance(layer, (Functional, keras.Sequential))


def _operations(model: Any) -> list[Any]:
    """The operations of a functional or sequential model."""
    if isinstance(model, keras.Sequential):
        # None until the model is built.
        model, layers = model._functional, model.layers
        if model is None:
            return list(layers)
    found: list[Any] = model.operations
    return found


def _is_known(operation: Any) -> bool:
    """Whether an operation of a functional model computes each row from that row."""
    nodes = operation._inbound_nodes
    if isinstance(operation, keras.layers.Layer):
        tensors = [tensor for node in nodes for tensor in node.input_tensors]
        return is_row_wise(operation, [len(tensor.shape) for tensor in tensors])
    kind = type(operation)
    if (
        not kind.__module__.startswith("keras.src.")
        or kind.__name__ not in _ELEMENTWISE
    ):
        return False
    for node in nodes:
        # Tensors of different ranks are aligned at their last axes, and an array could
        # have a value for each row.
        if len({len(tensor.shape) for tensor in node.input_tensors}) != 1:
            return False
        given = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        plain = (keras.KerasTensor, bool, int, float, str, type(None))
        if not all(isinstance(value, plain) for value in given):
            return False
    return True


def _inner_layers(layer: Any) -> tuple[Sequence[Any], int]:
    """Layers of the user's choice in a layer of Keras, and by how many axes less
    their inputs have."""
    name = type(layer).__name__
    if name == "Bidirectional":
        return (layer.forward_layer, layer.backward_layer), 0
    if name == "TimeDistributed":
        return (layer.layer,), 1
    if name == "SpectralNormalization":
        return (layer.layer,), 0
    if name == "StackedRNNCells":
        return layer.cells, 0
    if name in _RNN:
        # Cells are called with one step.
        return (layer.cell,), 1
    return (), 0


def _is_known_class(model: Any) -> bool:
    """Whether no class of the user's changes what the call of a model does."""
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in ("keras", "keras_strategies", "builtins", "abc"):
            continue
        if "_keras_strategies_kind" in vars(kind):
            continue  # The subclass that records a strategy.
        if package in ("torch", "tensorflow"):
            continue  # Bases of Keras's own layers.
        inherited = set(dir(keras.Model)) | set(dir(keras.Sequential))
        inherited |= {"operations", "input_structure"}
        own = set(vars(kind)) - NAMES_OF_TRAINING
        if own & inherited:
            return False
    return True


def _has_known_functions(layer: Any, ranks: Sequence[int] | None = None) -> bool:
    """Whether all functions that a layer holds for its call are known.

    Args:
        layer: the layer.
        ranks: the numbers of axes of its inputs; None if it suffices that they are
            Keras's.
    """
    activations = ("activation", "recurrent_activation")
    if ranks is not None:
        # Layers are no entries of `vars` on Torch.
        held = [getattr(layer, name, None) for name in activations]
        if not all(_is_known_activation(each, ranks) for each in held):
            return False
    for name, value in vars(layer).items():
        if name in activations and ranks is not None:
            continue
        if name == "activity_regularizer":
            if value is None:
                continue
            own = getattr(keras.regularizers, type(value).__name__, None)
            if type(value) is not own or type(value).__name__ not in _SUMS:
                return False
        elif (
            callable(value)
            and not isinstance(value, (keras.layers.Layer, keras.Variable))
            and name not in _NOT_CALLED_NAMES
            and not name.endswith(_NOT_CALLED)
            and name not in (STRATEGY_ATTRIBUTE, "build", "optimizer", "quantize")
        ):
            module = getattr(value, "__module__", None) or type(value).__module__
            # In models, what their training calls: losses and metrics.
            of_training = _is_container(layer) and name != "call"
            is_of_keras = module.partition(".")[0] == "keras"
            is_known = is_of_keras and not isinstance(value, types.FunctionType)
            if ranks is None:
                is_known = is_of_keras
            if not (isinstance(value, type) or of_training or is_known):
                return False
    return True


def _is_known_activation(value: Any, ranks: Sequence[int]) -> bool:
    """Whether an activation computes each row from that row; a layer may be one."""
    if value is None:
        return True
    if isinstance(value, keras.layers.Layer):
        return is_row_wise(value, ranks)
    name = getattr(value, "__name__", "")
    if value is not getattr(keras.activations, name, None):
        return False
    if name in _LAST_AXIS_ACTIVATIONS:
        return min(ranks, default=0) >= 2
    return name in _ELEMENTWISE_ACTIVATIONS.split()


# Layers with an axis.


def _is_other_axis(axis: Any, ranks: Sequence[int]) -> bool:
    """Whether no axis is that of the rows; negative ones need the number of axes."""
    if axis is None:
        return False
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    if not ranks or min(ranks) < 2:
        return False
    return all(int(each) % rank != 0 for each in axes for rank in set(ranks))


def _with_axis(layer: Any, ranks: Sequence[int]) -> bool:
    return _is_other_axis(layer.axis, ranks)


def _with_axes_of_build(layer: Any, ranks: Sequence[int]) -> bool:
    return layer.axis is None or _is_other_axis(layer.axis, ranks)


def _einsum(layer: Any, ranks: Sequence[int]) -> bool:
    """Whether the first axis of the input is that of the output, and no weight's."""
    inputs, _, output = layer.equation.replace(" ", "").partition("->")
    rows, _, kernel = inputs.partition(",")
    if rows.startswith("...") or output.startswith("..."):
        return rows.startswith("...") and output.startswith("...")
    first = rows[:1]
    return bool(first) and output[:1] == first and first not in kernel + rows[1:]


def _attention(layer: Any, ranks: Sequence[int]) -> bool:
    axes = layer._attention_axes
    is_other = axes is None or all(axis > 0 for axis in axes)
    return is_other and _at_least(3)(layer, ranks)


def _at_least(rank: int) -> Callable[[Any, Sequence[int]], bool]:
    """Layers of inputs with so many axes: with fewer, rows are along the others."""
    return lambda layer, ranks: min(ranks, default=0) >= rank


def _attends(layer: Any, ranks: Sequence[int]) -> bool:
    # Masks have an axis less.
    return max(ranks, default=0) >= 3 and min(ranks) >= 2


def _rescales(layer: Any, ranks: Sequence[int]) -> bool:
    # An array with as many axes could have a value for each row.
    least = min(ranks, default=0)
    return all(np.ndim(each) < max(least, 1) for each in (layer.scale, layer.offset))


def _encodes(layer: Any, ranks: Sequence[int]) -> bool:
    """Lookups and encodings, which call TensorFlow there and are traced elsewhere."""
    if keras.backend.backend() != "tensorflow" or getattr(layer, "sparse", False):
        return False
    is_one_to_one = layer.output_mode in ("int", "one_hot")
    return is_one_to_one or min(ranks, default=0) >= 2


def _recurrent(layer: Any, ranks: Sequence[int]) -> bool:
    return not layer.stateful  # A state for each row of the former batch.


def _dropout(layer: Any, ranks: Sequence[int]) -> bool:
    # The same numbers for all rows are drawn once for a batch.
    shape = layer.noise_shape
    return shape is None or shape[0] is None


def _time_distributed(layer: Any, ranks: Sequence[int]) -> bool:
    # The inner layer's input has an axis less; with two axes, an axis of the inner
    # layer could be the rows.
    return min(ranks, default=0) >= 3


def _transforms(layer: Any, ranks: Sequence[int]) -> bool:
    """Whether a layer transforms each image of a batch by numbers of its own.

    Keras on Torch transforms one image after the other, so that the operations differ
    with the rows. Elsewhere the layers are proved by their operations.
    """
    return keras.backend.backend() == "torch" and list(ranks) == [4]


_CHECKED: dict[str, Callable[[Any, Sequence[int]], bool]] = {
    "Activation": lambda layer, ranks: True,
    "ActivityRegularization": lambda layer, ranks: True,
    "AdditiveAttention": _attends,
    "AlphaDropout": _dropout,
    "Attention": _attends,
    "BatchNormalization": _with_axis,
    "ConvLSTM1D": _recurrent,
    "ConvLSTM2D": _recurrent,
    "ConvLSTM3D": _recurrent,
    "CategoryEncoding": _encodes,
    "Concatenate": _with_axis,
    "Discretization": _encodes,
    "Dot": lambda layer, ranks: _is_other_axis(layer.axes, ranks),
    "Dropout": _dropout,
    "EinsumDense": _einsum,
    "GRU": _recurrent,
    "GroupNormalization": _with_axis,
    "GroupedQueryAttention": _attends,
    "Hashing": _encodes,
    "IntegerLookup": _encodes,
    "LSTM": _recurrent,
    "LayerNormalization": _with_axis,
    "Masking": _at_least(2),
    "MultiHeadAttention": _attention,
    "Normalization": _with_axes_of_build,
    "RNN": _recurrent,
    "RMSNormalization": _with_axis,
    "Rescaling": _rescales,
    "RandomRotation": _transforms,
    "RandomShear": _transforms,
    "RandomTranslation": _transforms,
    "RandomZoom": _transforms,
    "SimpleRNN": _recurrent,
    "Softmax": _with_axis,
    "StringLookup": _encodes,
    "TimeDistributed": _time_distributed,
    "UnitNormalization": _with_axis,
}


def adds_sums(metric: Any, ranks: Sequence[int]) -> bool:
    """Whether the update of a metric adds a sum over rows to each of its variables.

    The code of these counts entries by reading values, which a row proof does not
    follow.

    Args:
        metric: a `keras.metrics.Metric`.
        ranks: the numbers of axes of `y_true` and `y_pred`.
    """
    if type(metric) in _OF_CLASSES:
        # Classes are found along an axis, of what has an entry for each.
        are_sparse = metric.sparse_y_true, metric.sparse_y_pred
        found = [
            r for r, is_sparse in zip(ranks, are_sparse, strict=False) if not is_sparse
        ]
        return len(ranks) == 2 and (not found or _is_other_axis(metric.axis, found))
    return type(metric) in _OF_SUMS


_OF_CLASSES = (
    keras.metrics.IoU,
    keras.metrics.MeanIoU,
    keras.metrics.OneHotIoU,
    keras.metrics.OneHotMeanIoU,
)
_OF_SUMS = (
    keras.metrics.AUC,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.BinaryIoU,
)
