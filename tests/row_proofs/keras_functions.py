"""A call with rows of every function of `keras.ops`, each in a form that rows allow."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from keras import ops

from row_proofs import proofs as own
from row_proofs.proofs import FLOAT, function, integers, mixing_function

#: They take no tensor of a batch, or return none: shapes, constants, tests of Python.
_WITHOUT_ROWS = """arange array bartlett blackman convert_to_numpy dtype empty eye full
    geomspace hamming hanning identity is_tensor kaiser linspace logspace ndim ones
    shape size tri unravel_index zeros"""
WITHOUT_ROWS = frozenset(_WITHOUT_ROWS.split())
SQUARE, IMAGE, LARGE = (4, 4), (8, 8, 3), (16, 16, 3)
TWO = ((6,), (6,))
TABLE = np.random.default_rng(3).normal(size=(6, 4)).astype(FLOAT)
EDGES = np.array([-1.0, 0.0, 1.0], FLOAT)
SEGMENTS = np.array([0, 0, 1, 1, 2, 2], "int32")
KERNEL = np.random.default_rng(4).normal(size=(3, 3, 3, 2)).astype(FLOAT)
ONES, ZEROS = np.ones(6, FLOAT), np.zeros(6, FLOAT)
AFFINE = np.array([1.0, 0.1, 0, 0.1, 1, 0, 0, 0], FLOAT)
CORNERS = np.array([[0, 0], [0, 7], [7, 0], [7, 7]], FLOAT)
FLAGS = own.Argument((6,), "bool")
stop = ops.stop_gradient
Cases = dict[str, own.RowCase]


def positive(x: Any) -> Any:
    return ops.abs(x) + 0.5


def definite(x: Any) -> Any:
    return ops.matmul(x, ops.swapaxes(x, -1, -2)) + 4.0 * ops.eye(x.shape[-1])


def of(name: str) -> Any:
    return operator.attrgetter(name)(ops)


def cases(names: str, call: own.Function, *shapes: Any) -> Cases:
    """A call of each of some functions, which is its first argument."""
    return {
        name: function(lambda *xs, name=name: call(of(name), *xs), *shapes)
        for name in names.split()
    }


def calls(names: str, *more: Any, on: Any = (6,), **options: Any) -> Cases:
    """Functions of rows and of the same further arguments, of a shape without rows."""
    return cases(names, lambda f, x: f(x, *more, **options), on)


def plain(names: str, *arguments: Any) -> Cases:
    return {name: function(of(name), *arguments) for name in names.split()}


def of_values(names: str, change: own.Function, *shapes: Any) -> Cases:
    return cases(names, lambda f, *xs: f(*map(change, xs)), *shapes)


def each_row(apply: own.Function, shape: Any = (6,)) -> own.RowCase:
    return function(lambda x: ops.vectorized_map(apply, x), shape)


def columns(apply: own.Function, shape: Any = (6,)) -> own.RowCase:
    return function(lambda x: ops.transpose(apply(ops.transpose(x))), shape)


def as_complex(x: Any) -> Any:
    return ops.view_as_complex(ops.reshape(x, (-1, 3, 2)))


def for_each(like: Any, values: Any) -> Any:
    return ops.multiply(ops.ones_like(like), values)


def perspective(x: Any) -> Any:
    each = for_each(x[:, :4, :2, 0], CORNERS)
    return ops.image.perspective_transform(x, each, each + 0.5)


def rescaled(x: Any) -> Any:
    sizes = (x.shape[0], 4, 4, 3), 0.5 * ONES[:2], ZEROS[:2]
    return ops.image.scale_and_translate(x, *sizes, (1, 2), "linear")


def halve(i: Any, h: Any) -> Any:
    return i + 1, h * 0.5


def ctc_decode(x: Any) -> Any:
    lengths = ops.cast(ops.ones_like(x[:, 0, 0]) * 5, "int32")
    return ops.ctc_decode(x, lengths, strategy="greedy")[0][0]


def ctc_loss(labels: Any, x: Any) -> Any:
    ones = ops.ones_like(labels[:, 0])
    return ops.ctc_loss(labels + 1, x, 2 * ones, 8 * ones)


_OF_ONE = """abs absolute angle arcsinh arctan cbrt ceil celu conj conjugate copy cos
    cosh deg2rad elu erf erfc exp exp2 expm1 fabs floor gelu hard_shrink hard_sigmoid
    hard_silu hard_swish hard_tanh i0 isfinite isinf isnan isneginf isposinf isreal
    leaky_relu log_sigmoid nan_to_num negative rad2deg real relu relu6 round selu
    sigmoid sign signbit silu sin sinc sinh soft_shrink softplus softsign sparse_plus
    sparse_sigmoid square squareplus stop_gradient swish tan tanh tanh_shrink trunc
    convert_to_tensor zeros_like ones_like fliplr ravel"""
_OF_TWO = """add arctan2 equal fmax fmin greater greater_equal hypot isclose less
    less_equal logaddexp logaddexp2 maximum minimum multiply nextafter not_equal
    subtract divide divide_no_nan true_divide fmod mod power"""
_INTEGERS = """bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
    gcd lcm left_shift right_shift"""
_ALONG = """all any amax amin argmax argmin average count_nonzero logsumexp max mean
    median min nanargmax nanargmin nanmax nanmean nanmedian nanmin nanprod nanstd nansum
    nanvar norm prod ptp std sum var argsort cumprod cumsum diff flip log_softmax
    nancumprod nancumsum softmax sort sparsemax trapezoid glu normalize"""
FUNCTIONS: Cases = {
    **plain(_OF_ONE),
    **of_values(
        "arccosh log log10 log1p log2 reciprocal rsqrt sqrt", lambda x: 1 + positive(x)
    ),
    **of_values("arccos arcsin arctanh erfinv", lambda x: 0.9 * ops.tanh(x)),
    **of_values(_OF_TWO, positive, *TWO),
    # Torch has no derivatives of them.
    **cases(
        "floor_divide heaviside", lambda f, x, y: f(stop(x), stop(positive(y))), *TWO
    ),
    **plain(_INTEGERS, integers(6), integers(6)),
    **plain("bitwise_invert bitwise_not", integers(6)),
    **plain("logical_and logical_or logical_xor", FLAGS, FLAGS),
    **plain("logical_not", FLAGS),
    **of_values("imag", lambda x: ops.cast(x, "complex64")),
    **plain("ldexp", (6,), integers(6)),
    **calls("cast", "float16"),
    **calls("clip", -1.0, 1.0),
    **calls("saturate_cast view", "int32"),
    **calls("threshold", 0.5, 0.0),
    "empty_like": function(lambda x: 0.0 * ops.nan_to_num(ops.empty_like(x)) + x),
    "full_like": function(lambda x: x + ops.full_like(x, 2.0)),
    "polar": function(lambda x: ops.real(ops.polar(positive(x), x))),
    "select": function(lambda x: ops.select([x > 1.0, x > 0.0], [x, 2 * x], 0.0)),
    "where": function(lambda x: ops.where(x > 0, x, 0.1 * x)),
    "allclose": mixing_function(lambda x, y: ops.allclose(x, y), *TWO),
    **calls(_ALONG, axis=-1),
    **calls("argpartition", 2, axis=-1),
    **calls("percentile nanpercentile", 30.0, axis=-1),
    **calls("quantile nanquantile", 0.3, axis=-1),
    **calls("moments", axes=[-1]),
    **calls("top_k", 2),
    **calls("rms_normalization", ONES, axis=-1),
    **calls("layer_normalization", ONES, ZEROS, axis=-1),
    **calls("batch_normalization", ZEROS, ONES, axis=-1),
    "append": function(lambda x, y: ops.append(x, y, axis=1), (6,), (3,)),
    **calls("array_split split", 2, axis=1),
    "broadcast_to": function(lambda x: ops.broadcast_to(x, (3, *x.shape))[1]),
    "concatenate": function(lambda x, y: ops.concatenate([x, y], 1), (6,), (3,)),
    **{name: each_row(of(name)) for name in ("diag", "diagflat", "vander")},
    **calls("diagonal trace", axis1=1, axis2=2, on=SQUARE),
    **calls("dsplit", 2, on=SQUARE),
    "dstack": function(lambda x, y: ops.dstack([x, y]), SQUARE, SQUARE),
    **calls("expand_dims", 1),
    "flipud": mixing_function(ops.flipud),
    **calls("get_item", (slice(None), slice(1, 3))),
    **calls("hsplit", 2),
    "hstack": function(lambda x, y: ops.hstack([x, y]), (6,), (3,)),
    "meshgrid": each_row(lambda row: ops.meshgrid(row, row)[0]),
    **calls("moveaxis swapaxes", 1, 2, on=SQUARE),
    **calls("pad", ((0, 0), (1, 1))),
    **calls("rearrange", "b h w -> b w h", on=SQUARE),
    **calls("repeat", 2, axis=1),
    **calls("reshape", (-1, 3, 2)),
    **calls("roll", 1, axis=1),
    **calls("rot90", axes=(1, 2), on=SQUARE),
    **calls("squeeze", 1, on=(1, 6)),
    "stack": function(lambda x: ops.stack([x, x], axis=1)),
    **calls("tile", (1, 2)),
    **calls("transpose", (0, 2, 1), on=SQUARE),
    **plain("tril triu", SQUARE),
    **calls("unstack", axis=1),
    "view_as_complex": function(lambda x: ops.real(as_complex(x))),
    "view_as_real": function(lambda x: ops.view_as_real(as_complex(x))),
    "vsplit": mixing_function(lambda x: ops.vsplit(x, 2)),
    "vstack": mixing_function(lambda x, y: ops.vstack([x, y]), *TWO),
    "nonzero": mixing_function(lambda x: ops.nonzero(x)[0]),
    "unique": mixing_function(ops.unique, integers(6)),
    **plain("cdist", (5, 3), (4, 3)),
    "correlate": each_row(lambda row: ops.correlate(row, EDGES)),
    "corrcoef": mixing_function(ops.corrcoef),
    "cross": function(lambda x, y: ops.cross(x, y, axis=-1), (3,), (3,)),
    **calls("dot matmul", TABLE),
    "einsum": function(lambda x: ops.einsum("bi,ij->bj", x, TABLE)),
    **calls("inner", TABLE.T),
    **calls("kron", np.ones((1, 2), FLOAT)),
    **calls("outer", EDGES),
    **calls("tensordot", TABLE, 1),
    "vdot": each_row(lambda row: ops.vdot(row, row)),
    **cases("dot_product_attention", lambda f, x: f(x, x, x), (5, 2, 4)),
    "bincount": mixing_function(lambda i: ops.bincount(i, minlength=4), integers(6)),
    **calls("digitize isin", EDGES),
    **calls("extract_sequences", 4, 2, on=(12,)),
    "histogram": mixing_function(lambda x: ops.histogram(x[:, 0], bins=4)[0]),
    "in_top_k": function(lambda i, x: ops.in_top_k(i, x, 2), integers(), (6,)),
    **calls("multi_hot one_hot", 5, on=integers(6)),
    "scatter": columns(lambda c: ops.scatter([[4], [1]], c[:2], (6, c.shape[1]))),
    "scatter_update": columns(lambda c: ops.scatter_update(c, [[4], [1]], c[:2])),
    "searchsorted": function(lambda x: ops.searchsorted(EDGES, ops.reshape(x, (-1,)))),
    **{
        name: columns(lambda c, name=name: of(name)(c, SEGMENTS, num_segments=3))
        for name in ("segment_max", "segment_min", "segment_prod", "segment_sum")
    },
    "slice": function(lambda x: ops.slice(x, (0, 1), (x.shape[0], 3))),
    # TensorFlow has no gradient of it.
    "slice_update": function(
        lambda x: ops.slice_update(stop(x), (0, 1), stop(2.0 * x[:, :3]))
    ),
    "take": function(lambda i: ops.take(TABLE, i, axis=0), integers(6)),
    **cases("take_along_axis", lambda f, x, i: f(x, i, axis=1), (6,), integers(2)),
    **of_values("cholesky inv logdet matrix_rank pinv", definite, SQUARE),
    **of_values("cholesky_inverse", lambda x: ops.cholesky(definite(x)), SQUARE),
    **plain("det", SQUARE),
    "eig": function(lambda x: ops.abs(ops.eig(definite(x))[0]), SQUARE),
    **cases("eigh lu_factor", lambda f, x: f(definite(x))[0], SQUARE),
    "lstsq": columns(lambda c: ops.lstsq(TABLE.T, c), (4,)),
    **cases("qr slogdet", lambda f, x: f(definite(x))[1], SQUARE),
    "solve": function(lambda x, y: ops.solve(definite(x), y), SQUARE, (4, 2)),
    "solve_triangular": function(
        lambda x, y: ops.solve_triangular(ops.cholesky(definite(x)), y, lower=True),
        *[SQUARE, (4, 2)],
    ),
    "svd": function(lambda x: ops.svd(definite(x), compute_uv=False), SQUARE),
    "jvp": function(lambda x: ops.jvp(lambda y: ops.square(y), (x,), (2.0 * x,))[1]),
    **calls("adaptive_average_pool adaptive_max_pool", 2, on=IMAGE),
    **calls("average_pool max_pool", 2, on=IMAGE),
    **calls("conv depthwise_conv", KERNEL, on=IMAGE),
    **calls("conv_transpose", KERNEL.transpose(0, 1, 3, 2), 2, on=IMAGE),
    **calls("depth_to_space", 2, on=(4, 4, 4)),
    **calls("fold", (4, 4), 2, stride=2, on=(12, 4)),
    "psnr": mixing_function(lambda x, y: ops.psnr(x, y, 1.0), IMAGE, IMAGE),
    **calls("separable_conv", KERNEL, np.ones((1, 1, 6, 4), FLOAT), on=IMAGE),
    **calls("space_to_depth image.extract_patches", 2, on=IMAGE),
    **calls("unfold", 2, on=(3, 8, 8)),
    "image.affine_transform": function(
        lambda x: ops.image.affine_transform(x, for_each(x[:, 0, 0, :1], AFFINE)), IMAGE
    ),
    **calls("image.crop_images", 1, 1, target_height=4, target_width=4, on=IMAGE),
    **calls("image.elastic_transform", seed=3, on=IMAGE),
    **calls("image.extract_patches_3d", 2, on=(4, 4, 4, 2)),
    **calls("image.gaussian_blur", on=IMAGE),
    **of_values("image.hsv_to_rgb image.rgb_to_hsv", ops.sigmoid, IMAGE),
    "image.map_coordinates": each_row(
        lambda row: ops.image.map_coordinates(row, np.ones((2, 5), FLOAT), 1), SQUARE
    ),
    **calls("image.pad_images", 1, 1, target_height=10, target_width=10, on=IMAGE),
    "image.perspective_transform": function(perspective, IMAGE),
    **calls("image.resize", (4, 4), on=IMAGE),
    **plain("image.rgb_to_grayscale image.sobel_edges", IMAGE),
    "image.scale_and_translate": function(rescaled, IMAGE),
    "image.ssim": function(lambda x, y: ops.image.ssim(x, y, 1.0), LARGE, LARGE),
    "fft": function(lambda x: ops.fft((x, x))[1], (8,)),
    **cases("fft2 ifft2", lambda f, x: f((x, x))[1], SQUARE),
    "rfft": function(lambda x: ops.rfft(x)[0], (8,)),
    "irfft": function(lambda x: ops.irfft((x, x), 6), (4,)),
    "stft": function(lambda x: ops.stft(x, 8, 4, 8)[0], (32,)),
    "istft": function(lambda x: ops.istft(ops.stft(x, 8, 4, 8), 8, 4, 8), (32,)),
    **cases("binary_crossentropy", lambda f, x, y: f(ops.sigmoid(x), y, True), *TWO),
    **cases(
        "categorical_crossentropy", lambda f, x, y: f(ops.softmax(x), y, True), *TWO
    ),
    "sparse_categorical_crossentropy": function(
        lambda i, x: ops.sparse_categorical_crossentropy(i, x, True), integers(), (6,)
    ),
    "ctc_decode": function(ctc_decode, (5, 4)),
    "ctc_loss": function(ctc_loss, integers(2), (8, 6)),
    **cases("associative_scan", lambda f, x: f(lambda a, b: a + b, x, axis=1)),
    "cond": function(lambda x: ops.cond(True, lambda: x, lambda: 2.0 * x)),
    **cases("custom_gradient", lambda f, x: f(own.doubled(lambda x, g: g))(x)),
    "fori_loop": function(lambda x: ops.fori_loop(0, 3, lambda i, h: h * 0.5 + x, x)),
    "map": function(lambda x: ops.map(lambda row: row * 2.0, x)),
    "scan": columns(
        lambda c: ops.scan(lambda h, z: (h + z, h + z), ops.zeros_like(c[0]), c)[1]
    ),
    "switch": function(lambda x: ops.switch(1, [lambda y: y, lambda y: 2.0 * y], x)),
    "vectorize": function(lambda x: ops.vectorize(lambda v: v * 2.0)(x)),
    "vectorized_map": each_row(lambda row: row - ops.mean(row)),
    **cases("while_loop", lambda f, x: f(lambda i, h: i < 3, halve, (0, x))[1]),
}


def names_of_keras() -> set[str]:
    modules = {"": vars(ops).items(), "image.": vars(ops.image).items()}
    every = ((m, n, value) for m, named in modules.items() for n, value in named)
    return {m + n for m, n, value in every if n[0] != "_" and callable(value)}
