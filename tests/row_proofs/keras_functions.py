"""A call with rows of every function of `keras.ops`, each in a form that rows allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from row_proofs.case_layers import Apply
from row_proofs.row_case import FLOAT, Argument, RowCase, as_argument

#: They take no tensor of a batch, or return none: shapes, constants, tests of Python.
_WITHOUT_ROWS = """
    arange array bartlett blackman convert_to_numpy dtype empty eye full geomspace
    hamming hanning identity is_tensor kaiser linspace logspace ndim ones shape size
    tri unravel_index zeros
"""
WITHOUT_ROWS = frozenset(_WITHOUT_ROWS.split())


@dataclass(frozen=True)
class Use:
    """A use of a function.

    Args:
        apply: callable of the arguments.
        arguments: shapes without rows, or `Argument`s.
        mixes: bool, whether rows of any result depend on others, by definition.
    """

    apply: Callable[..., Any]
    arguments: tuple[Any, ...] = ((6,),)
    mixes: bool = False

    def case(self, name: str) -> RowCase:
        arguments = tuple(map(as_argument, self.arguments))
        return RowCase(name, lambda: Apply(self.apply), arguments)


def use(apply: Callable[..., Any], *arguments: Any) -> Use:
    return Use(apply, arguments or ((6,),))


def mixing(apply: Callable[..., Any], *arguments: Any) -> Use:
    return Use(apply, arguments or ((6,),), mixes=True)


def integers(*shape: int) -> Argument:
    return Argument(shape, "int32")


def flags(*shape: int) -> Argument:
    return Argument(shape, "bool")


def positive(x: Any) -> Any:
    return ops.abs(x) + 0.5


def within(x: Any) -> Any:
    """Numbers between -1 and 1, as those of a sine."""
    return 0.9 * ops.tanh(x)


def definite(x: Any) -> Any:
    """Positive definite matrices."""
    return ops.matmul(x, ops.swapaxes(x, -1, -2)) + 4.0 * ops.eye(x.shape[-1])


SQUARE = (4, 4)
IMAGE = (8, 8, 3)
TABLE = np.random.default_rng(3).normal(size=(6, 4)).astype(FLOAT)
EDGES = np.array([-1.0, 0.0, 1.0], FLOAT)
SEGMENTS = np.array([0, 0, 1, 1, 2, 2], "int32")


def of(name: str) -> Any:
    return getattr(ops, name)


def _elementwise() -> dict[str, Use]:
    found = {}
    plain = """
        abs absolute angle arcsinh arctan cbrt ceil celu conj conjugate copy cos cosh
        deg2rad elu erf erfc exp exp2 expm1 fabs floor gelu hard_shrink hard_sigmoid
        hard_silu hard_swish hard_tanh i0 isfinite isinf isnan isneginf isposinf
        isreal leaky_relu log_sigmoid nan_to_num negative rad2deg real relu relu6 round
        selu sigmoid sign signbit silu sin sinc sinh soft_shrink softplus softsign
        sparse_plus sparse_sigmoid square squareplus stop_gradient swish tan tanh
        tanh_shrink trunc convert_to_tensor zeros_like ones_like
    """
    for name in plain.split():
        found[name] = use(of(name))
    logarithms = "arccosh log log10 log1p log2 reciprocal rsqrt sqrt"
    for name in logarithms.split():
        found[name] = use(lambda x, name=name: of(name)(positive(x) + 1.0))
    for name in ["arccos", "arcsin", "arctanh", "erfinv"]:
        found[name] = use(lambda x, name=name: of(name)(within(x)))
    two = """
        add arctan2 equal fmax fmin greater greater_equal hypot isclose less
        less_equal logaddexp logaddexp2 maximum minimum multiply nextafter not_equal
        subtract divide divide_no_nan true_divide fmod mod power
    """
    for name in two.split():
        found[name] = use(
            lambda x, y, name=name: of(name)(positive(x), positive(y)), (6,), (6,)
        )
    for name in ["floor_divide", "heaviside"]:  # Torch has no derivatives of them.
        found[name] = use(
            lambda x, y, name=name: of(name)(
                ops.stop_gradient(x), ops.stop_gradient(positive(y))
            ),
            (6,),
            (6,),
        )
    integer = """
        bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd
        lcm left_shift right_shift
    """
    for name in integer.split():
        found[name] = use(of(name), integers(6), integers(6))
    found["bitwise_invert"] = found["bitwise_not"] = use(ops.bitwise_not, integers(6))
    for name in ["logical_and", "logical_or", "logical_xor"]:
        found[name] = use(of(name), flags(6), flags(6))
    found["logical_not"] = use(ops.logical_not, flags(6))
    found["imag"] = use(lambda x: ops.imag(ops.cast(x, "complex64")))
    found["ldexp"] = use(ops.ldexp, (6,), integers(6))
    return found


def _reductions() -> dict[str, Use]:
    found = {}
    names = """
        all any amax amin argmax argmin average count_nonzero logsumexp max mean median
        min nanargmax nanargmin nanmax nanmean nanmedian nanmin nanprod nanstd nansum
        nanvar norm prod ptp std sum var
    """
    for name in names.split():
        found[name] = use(lambda x, name=name: of(name)(x, axis=-1))
    along = """
        argpartition argsort cumprod cumsum diff flip log_softmax nancumprod nancumsum
        softmax sort sparsemax trapezoid
    """
    arguments = {"argpartition": {"kth": 2}}
    for name in along.split():
        found[name] = use(
            lambda x, name=name: of(name)(x, axis=-1, **arguments.get(name, {}))
        )
    for name in ["percentile", "nanpercentile"]:
        found[name] = use(lambda x, name=name: of(name)(x, 30.0, axis=-1))
    for name in ["quantile", "nanquantile"]:
        found[name] = use(lambda x, name=name: of(name)(x, 0.3, axis=-1))
    found["moments"] = use(lambda x: ops.moments(x, axes=[-1]))
    found["glu"] = use(lambda x: ops.glu(x, axis=-1))
    found["normalize"] = use(lambda x: ops.normalize(x, axis=-1))
    found["top_k"] = use(lambda x: ops.top_k(x, 2))
    found["rms_normalization"] = use(
        lambda x: ops.rms_normalization(x, np.ones(6, FLOAT), axis=-1)
    )
    found["layer_normalization"] = use(
        lambda x: ops.layer_normalization(
            x, np.ones(6, FLOAT), np.zeros(6, FLOAT), axis=-1
        )
    )
    found["batch_normalization"] = use(
        lambda x: ops.batch_normalization(
            x, np.zeros(6, FLOAT), np.ones(6, FLOAT), axis=-1
        )
    )
    return found


def _shapes() -> dict[str, Use]:
    return {
        "append": use(lambda x, y: ops.append(x, y, axis=1), (6,), (3,)),
        "array_split": use(lambda x: ops.array_split(x, 2, axis=1)),
        "broadcast_to": use(lambda x: ops.broadcast_to(x, (3, *x.shape))[1]),
        "cast": use(lambda x: ops.cast(x, "float16")),
        "clip": use(lambda x: ops.clip(x, -1.0, 1.0)),
        "concatenate": use(lambda x, y: ops.concatenate([x, y], 1), (6,), (3,)),
        "diag": use(lambda x: ops.vectorized_map(ops.diag, x)),
        "diagflat": use(lambda x: ops.vectorized_map(ops.diagflat, x)),
        "diagonal": use(lambda x: ops.diagonal(x, axis1=1, axis2=2), SQUARE),
        "dsplit": use(lambda x: ops.dsplit(x, 2), SQUARE),
        "dstack": use(lambda x, y: ops.dstack([x, y]), SQUARE, SQUARE),
        "empty_like": use(lambda x: 0.0 * ops.nan_to_num(ops.empty_like(x)) + x),
        "expand_dims": use(lambda x: ops.expand_dims(x, 1)),
        "fliplr": use(ops.fliplr),
        "flipud": mixing(ops.flipud),
        "full_like": use(lambda x: x + ops.full_like(x, 2.0)),
        "get_item": use(lambda x: ops.get_item(x, (slice(None), slice(1, 3)))),
        "hsplit": use(lambda x: ops.hsplit(x, 2)),
        "hstack": use(lambda x, y: ops.hstack([x, y]), (6,), (3,)),
        "meshgrid": use(
            lambda x: ops.vectorized_map(lambda r: ops.meshgrid(r, r)[0], x)
        ),
        "moveaxis": use(lambda x: ops.moveaxis(x, 1, 2), SQUARE),
        "pad": use(lambda x: ops.pad(x, ((0, 0), (1, 1)))),
        "ravel": use(lambda x: ops.ravel(x)),
        "rearrange": use(lambda x: ops.rearrange(x, "b h w -> b w h"), SQUARE),
        "repeat": use(lambda x: ops.repeat(x, 2, axis=1)),
        "reshape": use(lambda x: ops.reshape(x, (-1, 3, 2))),
        "roll": use(lambda x: ops.roll(x, 1, axis=1)),
        "rot90": use(lambda x: ops.rot90(x, axes=(1, 2)), SQUARE),
        "saturate_cast": use(lambda x: ops.saturate_cast(x, "int32")),
        "select": use(lambda x: ops.select([x > 1.0, x > 0.0], [x, 2 * x], 0.0)),
        "split": use(lambda x: ops.split(x, 2, axis=1)),
        "squeeze": use(lambda x: ops.squeeze(x, 1), (1, 6)),
        "stack": use(lambda x: ops.stack([x, x], axis=1)),
        "swapaxes": use(lambda x: ops.swapaxes(x, 1, 2), SQUARE),
        "tile": use(lambda x: ops.tile(x, (1, 2))),
        "transpose": use(lambda x: ops.transpose(x, (0, 2, 1)), SQUARE),
        "tril": use(ops.tril, SQUARE),
        "triu": use(ops.triu, SQUARE),
        "trace": use(lambda x: ops.trace(x, axis1=1, axis2=2), SQUARE),
        "unstack": use(lambda x: ops.unstack(x, axis=1)),
        "vander": use(lambda x: ops.vectorized_map(ops.vander, x)),
        "view": use(lambda x: ops.view(x, "int32")),
        "view_as_complex": use(
            lambda x: ops.real(ops.view_as_complex(ops.reshape(x, (-1, 3, 2))))
        ),
        "view_as_real": use(
            lambda x: ops.view_as_real(ops.view_as_complex(ops.reshape(x, (-1, 3, 2))))
        ),
        "polar": use(lambda x: ops.real(ops.polar(positive(x), x))),
        "vsplit": mixing(lambda x: ops.vsplit(x, 2)),
        "vstack": mixing(lambda x, y: ops.vstack([x, y]), (6,), (6,)),
        "where": use(lambda x: ops.where(x > 0, x, 0.1 * x)),
        "nonzero": mixing(lambda x: ops.nonzero(x)[0]),
        "unique": mixing(ops.unique, integers(6)),
    }


def _products() -> dict[str, Use]:
    return {
        "cdist": use(ops.cdist, (5, 3), (4, 3)),
        "correlate": use(
            lambda x: ops.vectorized_map(lambda r: ops.correlate(r, EDGES), x)
        ),
        "corrcoef": mixing(ops.corrcoef),
        "cross": use(lambda x, y: ops.cross(x, y, axis=-1), (3,), (3,)),
        "dot": use(lambda x: ops.dot(x, TABLE)),
        "einsum": use(lambda x: ops.einsum("bi,ij->bj", x, TABLE)),
        "inner": use(lambda x: ops.inner(x, TABLE.T)),
        "kron": use(lambda x: ops.kron(x, np.ones((1, 2), FLOAT))),
        "matmul": use(lambda x: ops.matmul(x, TABLE)),
        "outer": use(lambda x: ops.outer(x, EDGES)),
        "tensordot": use(lambda x: ops.tensordot(x, TABLE, 1)),
        "vdot": use(lambda x: ops.vectorized_map(lambda r: ops.vdot(r, r), x)),
        "dot_product_attention": use(
            lambda x: ops.dot_product_attention(x, x, x), (5, 2, 4)
        ),
    }


def _gathers() -> dict[str, Use]:
    return {
        "bincount": mixing(lambda i: ops.bincount(i, minlength=4), integers(6)),
        "digitize": use(lambda x: ops.digitize(x, EDGES)),
        "extract_sequences": use(lambda x: ops.extract_sequences(x, 4, 2), (12,)),
        "histogram": mixing(lambda x: ops.histogram(x[:, 0], bins=4)[0]),
        "in_top_k": use(lambda i, x: ops.in_top_k(i, x, 2), integers(), (6,)),
        "isin": use(lambda x: ops.isin(x, EDGES)),
        "multi_hot": use(lambda i: ops.multi_hot(i, 5), integers(6)),
        "one_hot": use(lambda i: ops.one_hot(i, 5), integers(6)),
        "scatter": use(
            lambda x: ops.transpose(
                ops.scatter([[4], [1]], ops.transpose(x[:, :2]), (6, x.shape[0]))
            )
        ),
        "scatter_update": use(
            lambda x: ops.transpose(
                ops.scatter_update(
                    ops.transpose(x), [[4], [1]], ops.transpose(x[:, :2])
                )
            )
        ),
        "searchsorted": use(lambda x: ops.searchsorted(EDGES, ops.reshape(x, (-1,)))),
        **{
            name: use(
                lambda x, name=name: ops.transpose(
                    of(name)(ops.transpose(x), SEGMENTS, num_segments=3)
                )
            )
            for name in ("segment_max", "segment_min", "segment_prod", "segment_sum")
        },
        "slice": use(lambda x: ops.slice(x, (0, 1), (x.shape[0], 3))),
        # TensorFlow has no gradient of it.
        "slice_update": use(
            lambda x: ops.slice_update(
                ops.stop_gradient(x), (0, 1), ops.stop_gradient(2.0 * x[:, :3])
            )
        ),
        "take": use(lambda i: ops.take(TABLE, i, axis=0), integers(6)),
        "take_along_axis": use(
            lambda x, i: ops.take_along_axis(x, i, axis=1), (6,), integers(2)
        ),
    }


def _linear_algebra() -> dict[str, Use]:
    return {
        "cholesky": use(lambda x: ops.cholesky(definite(x)), SQUARE),
        "cholesky_inverse": use(
            lambda x: ops.cholesky_inverse(ops.cholesky(definite(x))), SQUARE
        ),
        "det": use(ops.det, SQUARE),
        "eig": use(lambda x: ops.abs(ops.eig(definite(x))[0]), SQUARE),
        "eigh": use(lambda x: ops.eigh(definite(x))[0], SQUARE),
        "inv": use(lambda x: ops.inv(definite(x)), SQUARE),
        "logdet": use(lambda x: ops.logdet(definite(x)), SQUARE),
        "lstsq": use(
            lambda x: ops.transpose(ops.lstsq(TABLE.T, ops.transpose(x))), (4,)
        ),
        "lu_factor": use(lambda x: ops.lu_factor(definite(x))[0], SQUARE),
        "matrix_rank": use(lambda x: ops.matrix_rank(definite(x)), SQUARE),
        "pinv": use(lambda x: ops.pinv(definite(x)), SQUARE),
        "qr": use(lambda x: ops.qr(definite(x))[1], SQUARE),
        "slogdet": use(lambda x: ops.slogdet(definite(x))[1], SQUARE),
        "solve": use(lambda x, y: ops.solve(definite(x), y), SQUARE, (4, 2)),
        "solve_triangular": use(
            lambda x, y: ops.solve_triangular(ops.cholesky(definite(x)), y, lower=True),
            SQUARE,
            (4, 2),
        ),
        "svd": use(lambda x: ops.svd(definite(x), compute_uv=False), SQUARE),
        "jvp": use(lambda x: ops.jvp(lambda y: ops.square(y), (x,), (2.0 * x,))[1]),
    }


def _images() -> dict[str, Use]:
    kernel = np.random.default_rng(4).normal(size=(3, 3, 3, 2)).astype(FLOAT)
    transform = np.array([1.0, 0.1, 0, 0.1, 1, 0, 0, 0], FLOAT)

    def affine(x: Any) -> Any:
        return ops.image.affine_transform(
            x, ops.multiply(ops.ones_like(x[:, 0, 0, :1]), transform)
        )

    def perspective(x: Any) -> Any:
        corners = ops.multiply(
            ops.ones_like(x[:, :4, :2, 0]),
            np.array([[0, 0], [0, 7], [7, 0], [7, 7]], FLOAT),
        )
        return ops.image.perspective_transform(x, corners, corners + 0.5)

    return {
        "adaptive_average_pool": use(lambda x: ops.adaptive_average_pool(x, 2), IMAGE),
        "adaptive_max_pool": use(lambda x: ops.adaptive_max_pool(x, 2), IMAGE),
        "average_pool": use(lambda x: ops.average_pool(x, 2), IMAGE),
        "conv": use(lambda x: ops.conv(x, kernel), IMAGE),
        "conv_transpose": use(
            lambda x: ops.conv_transpose(x, kernel.transpose(0, 1, 3, 2), 2), IMAGE
        ),
        "depth_to_space": use(lambda x: ops.depth_to_space(x, 2), (4, 4, 4)),
        "depthwise_conv": use(lambda x: ops.depthwise_conv(x, kernel), IMAGE),
        "fold": use(lambda x: ops.fold(x, (4, 4), 2, stride=2), (12, 4)),
        "max_pool": use(lambda x: ops.max_pool(x, 2), IMAGE),
        "psnr": mixing(lambda x, y: ops.psnr(x, y, 1.0), IMAGE, IMAGE),
        "separable_conv": use(
            lambda x: ops.separable_conv(x, kernel, np.ones((1, 1, 6, 4), FLOAT)), IMAGE
        ),
        "space_to_depth": use(lambda x: ops.space_to_depth(x, 2), IMAGE),
        "unfold": use(lambda x: ops.unfold(x, 2), (3, 8, 8)),
        "image.affine_transform": use(affine, IMAGE),
        "image.crop_images": use(
            lambda x: ops.image.crop_images(x, 1, 1, target_height=4, target_width=4),
            IMAGE,
        ),
        "image.elastic_transform": use(
            lambda x: ops.image.elastic_transform(x, seed=3), IMAGE
        ),
        "image.extract_patches": use(lambda x: ops.image.extract_patches(x, 2), IMAGE),
        "image.extract_patches_3d": use(
            lambda x: ops.image.extract_patches_3d(x, 2), (4, 4, 4, 2)
        ),
        "image.gaussian_blur": use(lambda x: ops.image.gaussian_blur(x), IMAGE),
        "image.hsv_to_rgb": use(lambda x: ops.image.hsv_to_rgb(ops.sigmoid(x)), IMAGE),
        "image.map_coordinates": use(
            lambda x: ops.vectorized_map(
                lambda r: ops.image.map_coordinates(r, np.ones((2, 5), FLOAT), 1), x
            ),
            SQUARE,
        ),
        "image.pad_images": use(
            lambda x: ops.image.pad_images(x, 1, 1, target_height=10, target_width=10),
            IMAGE,
        ),
        "image.perspective_transform": use(perspective, IMAGE),
        "image.resize": use(lambda x: ops.image.resize(x, (4, 4)), IMAGE),
        "image.rgb_to_grayscale": use(ops.image.rgb_to_grayscale, IMAGE),
        "image.rgb_to_hsv": use(lambda x: ops.image.rgb_to_hsv(ops.sigmoid(x)), IMAGE),
        "image.scale_and_translate": use(
            lambda x: ops.image.scale_and_translate(
                x,
                (x.shape[0], 4, 4, 3),
                np.array([0.5, 0.5], FLOAT),
                np.array([0.0, 0.0], FLOAT),
                (1, 2),
                "linear",
            ),
            IMAGE,
        ),
        "image.sobel_edges": use(ops.image.sobel_edges, IMAGE),
        "image.ssim": use(
            lambda x, y: ops.image.ssim(x, y, 1.0), (16, 16, 3), (16, 16, 3)
        ),
    }


def _signals() -> dict[str, Use]:
    return {
        "fft": use(lambda x: ops.fft((x, x))[1], (8,)),
        "fft2": use(lambda x: ops.fft2((x, x))[1], SQUARE),
        "ifft2": use(lambda x: ops.ifft2((x, x))[1], SQUARE),
        "rfft": use(lambda x: ops.rfft(x)[0], (8,)),
        "irfft": use(lambda x: ops.irfft((x, x), 6), (4,)),
        "stft": use(lambda x: ops.stft(x, 8, 4, 8)[0], (32,)),
        "istft": use(lambda x: ops.istft(ops.stft(x, 8, 4, 8), 8, 4, 8), (32,)),
    }


def _losses() -> dict[str, Use]:
    def ctc_decode(x: Any) -> Any:
        lengths = ops.cast(ops.ones_like(x[:, 0, 0]) * 5, "int32")
        return ops.ctc_decode(x, lengths, strategy="greedy")[0][0]

    def ctc_loss(labels: Any, x: Any) -> Any:
        ones = ops.ones_like(labels[:, 0])
        return ops.ctc_loss(labels + 1, x, 2 * ones, 8 * ones)

    return {
        "binary_crossentropy": use(
            lambda x, y: ops.binary_crossentropy(ops.sigmoid(x), y, from_logits=True),
            (6,),
            (6,),
        ),
        "categorical_crossentropy": use(
            lambda x, y: ops.categorical_crossentropy(
                ops.softmax(x), y, from_logits=True
            ),
            (6,),
            (6,),
        ),
        "sparse_categorical_crossentropy": use(
            lambda i, x: ops.sparse_categorical_crossentropy(i, x, from_logits=True),
            integers(),
            (6,),
        ),
        "ctc_decode": use(ctc_decode, (5, 4)),
        "ctc_loss": use(ctc_loss, integers(2), (8, 6)),
    }


def _control_flow() -> dict[str, Use]:
    def identity(x: Any) -> Any:
        @ops.custom_gradient
        def own(y: Any) -> Any:
            return (
                2.0 * y,
                lambda *args, upstream=None: args[0] if upstream is None else upstream,
            )

        return own(x)

    def associative(x: Any) -> Any:
        return ops.associative_scan(lambda a, b: a + b, x, axis=1)

    return {
        "associative_scan": use(associative),
        "cond": use(lambda x: ops.cond(True, lambda: x, lambda: 2.0 * x)),
        "custom_gradient": use(identity),
        "fori_loop": use(lambda x: ops.fori_loop(0, 3, lambda i, h: h * 0.5 + x, x)),
        "map": use(lambda x: ops.map(lambda row: row * 2.0, x)),
        "scan": use(
            lambda x: ops.transpose(
                ops.scan(
                    lambda c, z: (c + z, c + z),
                    ops.zeros_like(x[:, 0]),
                    ops.transpose(x),
                )[1]
            )
        ),
        "switch": use(lambda x: ops.switch(1, [lambda y: y, lambda y: 2.0 * y], x)),
        "vectorize": use(lambda x: ops.vectorize(lambda v: v * 2.0)(x)),
        "vectorized_map": use(
            lambda x: ops.vectorized_map(lambda row: row - ops.mean(row), x)
        ),
        "while_loop": use(
            lambda x: ops.while_loop(
                lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.5), (0, x)
            )[1]
        ),
        "threshold": use(lambda x: ops.threshold(x, 0.5, 0.0)),
        "allclose": mixing(lambda x, y: ops.allclose(x, y), (6,), (6,)),
    }


FUNCTIONS: dict[str, Use] = {
    **_elementwise(),
    **_reductions(),
    **_shapes(),
    **_products(),
    **_gathers(),
    **_linear_algebra(),
    **_images(),
    **_signals(),
    **_losses(),
    **_control_flow(),
}


def names_of_keras() -> set[str]:
    """The functions that Keras has."""

    def functions(module: Any) -> set[str]:
        return {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and callable(value)
        }

    return functions(ops) | {f"image.{name}" for name in functions(ops.image)}
