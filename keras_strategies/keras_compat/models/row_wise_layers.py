"""Keras's own layers that compute each row of their outputs from that row of inputs.

Functions and layers that a user passes to them are arguments like others: a layer is
known if its activation, cell or inner layer is.

A layer is in a table by its type and arguments. Its call is then Keras's code, which
these tables were written from (Keras 3.15 and 3.16); `tests/row_proofs` proves each of
them by its operations. Everything else is proved by its operations: layers and
functions of users, operations in functional models, layers with an axis of the rows.
"""

from __future__ import annotations

import re
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

#: Layers without an argument that could mix rows; of images, of any number of axes.
_ROW_WISE = """
    Activation ActivityRegularization AdaptiveAveragePooling AdaptiveMaxPooling Add
    Average AveragePooling Bidirectional Conv ConvLSTMCell ConvTranspose Cropping Dense
    DepthwiseConv ELU Embedding Flatten GRUCell GaussianDropout GaussianNoise
    GlobalAveragePooling GlobalMaxPooling Identity InputLayer LSTMCell LeakyReLU
    MaxPooling Maximum Minimum Multiply PReLU Permute ReLU RepeatVector Reshape
    ReversibleEmbedding SeparableConv SimpleRNNCell SpatialDropout SpectralNormalization
    StackedRNNCells Subtract UpSampling ZeroPadding
"""
#: Operations of functional models that compute each entry from those at its place.
_ELEMENTWISE = """
    Absolute Add Cast Divide Elu Equal Erf Exp Gelu Greater GreaterEqual HardSigmoid
    HardSilu LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum
    Minimum Multiply Negative NotEqual Power Relu Relu6 Rsqrt Sigmoid Sign Silu Softplus
    Sqrt Square Subtract Tanh TrueDivide
"""
#: Names of classes that Keras exports by another one.
_EXPORTED = {"GroupedQueryAttention": "GroupQueryAttention"}
#: A cell that Keras does not export.
_CONV_CELL = ("keras.src.layers.rnn.conv_lstm", "ConvLSTMCell")
#: Attributes with layers of the user's choice, and by how many axes less their inputs
#: have. Cells are called with one step.
_INNER = {
    "Bidirectional": (["forward_layer", "backward_layer"], 0),
    "SpectralNormalization": (["layer"], 0),
    "StackedRNNCells": (["cells"], 0),
    "TimeDistributed": (["layer"], 1),
    **dict.fromkeys(["ConvLSTM", "GRU", "LSTM", "RNN", "SimpleRNN"], (["cell"], 1)),
}
#: Regularizers that are sums over all entries, which Keras divides by the rows.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
#: Attributes with functions that a call does not use.
_NOT_CALLED = (
    *("initializer", "constraint", "regularizer", "optimizer", "quantize"),
    *("build", STRATEGY_ATTRIBUTE),
)
_ACTIVATIONS = ("activation", "recurrent_activation")
#: Functions of `keras.activations` that compute each entry from that at its place.
_ELEMENTWISE_ACTIVATIONS = """
    celu elu exponential gelu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu
    linear log_sigmoid mish relu relu6 selu sigmoid silu soft_shrink softplus softsign
    sparse_plus sparse_sigmoid squareplus tanh tanh_shrink threshold
"""
#: Those along the last axis.
_LAST_AXIS_ACTIVATIONS = frozenset(["glu", "log_softmax", "softmax", "sparsemax"])
#: Packages with bases of Keras's models, and of the subclass that records a strategy.
_OF_MODELS = "keras keras_strategies builtins abc torch tensorflow"
#: Names that a user's subclass of a model may define without changing its call.
_OF_TRAINING = """
    __init__ __module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__
    __firstlineno__ __static_attributes__ build compile compile_from_config compute_loss
    compute_metrics evaluate fit from_config get_compile_config get_config loss
    make_predict_function make_test_function make_train_function metrics name optimizer
    predict predict_on_batch predict_step summary test_on_batch test_step train_on_batch
    train_step
"""


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
    exported = getattr(keras.layers, _EXPORTED.get(name, name), None)
    if exported is not kind and (kind.__module__, name) != _CONV_CELL:
        return False
    name = re.sub("[123]D", "", name)
    check = _CHECKED.get(name)
    if not (name in _ROW_WISE.split() if check is None else check(layer, ranks)):
        return False
    names, fewer = _INNER.get(name, ([], 0))
    inner = keras.tree.flatten([getattr(layer, each) for each in names])
    return all(is_row_wise(each, [rank - fewer for rank in ranks]) for each in inner)


def _is_container(layer: Any) -> bool:
    from keras.src.models.functional import Functional

    return isinstance(layer, (Functional, keras.Sequential))


def _operations(model: Any) -> list[Any]:
    """The operations of a functional or sequential model."""
    # None until a sequential model is built.
    functional = model._functional if isinstance(model, keras.Sequential) else model
    return list(model.layers if functional is None else functional.operations)


def _is_known(operation: Any) -> bool:
    """Whether an operation of a functional model computes each row from that row."""
    nodes = operation._inbound_nodes
    if isinstance(operation, keras.layers.Layer):
        tensors = [tensor for node in nodes for tensor in node.input_tensors]
        return is_row_wise(operation, [len(tensor.shape) for tensor in tensors])
    kind = type(operation)
    is_of_keras = kind.__module__.startswith("keras.src.")
    if not is_of_keras or kind.__name__ not in _ELEMENTWISE.split():
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


def _is_known_class(model: Any) -> bool:
    """Whether no class of the user's changes what the call of a model does."""
    inherited = {*dir(keras.Model), *dir(keras.Sequential)}
    inherited |= {"operations", "input_structure"}
    for kind in type(model).__mro__:
        is_known = kind.__module__.partition(".")[0] in _OF_MODELS.split()
        own = inherited.intersection(vars(kind)) - {*_OF_TRAINING.split()}
        if own and not (is_known or "_keras_strategies_kind" in vars(kind)):
            return False
    return True


def _has_known_functions(layer: Any, ranks: Sequence[int]) -> bool:
    """Whether all functions that a layer holds for its call are known.

    Args:
        layer: the layer.
        ranks: the numbers of axes of its inputs.
    """
    # Layers are no entries of `vars` on Torch.
    held = [getattr(layer, name, None) for name in _ACTIVATIONS]
    if not all(_is_known_activation(each, ranks) for each in held):
        return False
    regularizer = layer.activity_regularizer
    if regularizer is not None and type(regularizer) not in _SUMS:
        return False
    # Models hold what their training calls: losses and metrics.
    return _is_container(layer) or all(
        name.endswith(_NOT_CALLED) or name in _ACTIVATIONS or _is_of_keras(value)
        for name, value in vars(layer).items()
        if callable(value)
    )


def _is_of_keras(value: Any) -> bool:
    """Whether what can be called is an object of Keras, and no function."""
    if isinstance(value, (keras.layers.Layer, keras.Variable, type)):
        return True
    module = getattr(value, "__module__", None) or type(value).__module__
    is_function = isinstance(value, types.FunctionType)
    return module.startswith("keras.") and not is_function


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
    if axis is None or min(ranks, default=0) < 2:
        return False
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return all(int(each) % rank != 0 for each in axes for rank in set(ranks))


def _with_axis(layer: Any, ranks: Sequence[int]) -> bool:
    axis = layer.axes if hasattr(layer, "axes") else layer.axis
    return _is_other_axis(axis, ranks)


def _einsum(layer: Any, ranks: Sequence[int]) -> bool:
    """Whether the first axis of the input is that of the output, and no weight's."""
    equation = layer.equation.replace(" ", "").replace("...", ".")
    inputs, _, output = equation.partition("->")
    rows, _, kernel = inputs.partition(",")
    first = rows[:1]
    return bool(first) and output[:1] == first and first not in kernel + rows[1:]


def _attention(layer: Any, ranks: Sequence[int]) -> bool:
    axes = layer._attention_axes
    is_other = axes is None or all(axis > 0 for axis in axes)
    return is_other and min(ranks, default=0) >= 3


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


_CHECKS: tuple[tuple[Callable[[Any, Sequence[int]], bool], str], ...] = (
    (_attends, "AdditiveAttention Attention GroupedQueryAttention"),
    (_attention, "MultiHeadAttention"),
    (_dropout, "AlphaDropout Dropout"),
    (_einsum, "EinsumDense"),
    (_encodes, "CategoryEncoding Discretization Hashing IntegerLookup StringLookup"),
    (lambda layer, ranks: min(ranks, default=0) >= 2, "Masking"),
    (_recurrent, "ConvLSTM GRU LSTM RNN SimpleRNN"),
    (_rescales, "Rescaling"),
    (_time_distributed, "TimeDistributed"),
    (_transforms, "RandomRotation RandomShear RandomTranslation RandomZoom"),
    (
        _with_axis,
        "BatchNormalization Concatenate Dot GroupNormalization LayerNormalization"
        " Normalization RMSNormalization Softmax UnitNormalization",
    ),
)
_CHECKED = {name: check for check, names in _CHECKS for name in names.split()}
#: Metrics that find classes along an axis, of what has an entry for each.
_OF_CLASSES = "IoU MeanIoU OneHotIoU OneHotMeanIoU"
_OF_SUMS = """
    AUC PrecisionAtRecall RecallAtPrecision SensitivityAtSpecificity
    SpecificityAtSensitivity BinaryIoU
"""


def adds_sums(metric: Any, ranks: Sequence[int]) -> bool:
    """Whether the update of a metric adds a sum over rows to each of its variables.

    The code of these counts entries by reading values, which a row proof does not
    follow.

    Args:
        metric: a `keras.metrics.Metric`.
        ranks: the numbers of axes of `y_true` and `y_pred`.
    """
    name = type(metric).__name__
    if type(metric) is not getattr(keras.metrics, name, None):
        return False
    if name in _OF_CLASSES.split():
        return metric.axis == -1 and len(ranks) == 2 and max(ranks) >= 2
    return name in _OF_SUMS.split()
