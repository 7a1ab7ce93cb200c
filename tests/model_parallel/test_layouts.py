"""Shards of variables: rules and meshes, without a framework."""

from __future__ import annotations

from typing import Any

import pytest

from keras_strategies.devices import Device
from keras_strategies.layouts import (
    AutoLayouts,
    FullyShardedLayouts,
    MappedLayouts,
    VariableMesh,
    closest_paths,
)

pytestmark = pytest.mark.one_backend("jax")

AUTO = AutoLayouts("model", 4, min_shard_bytes=0)


def mesh(rule=AUTO, shape=(2, 4)):
    count = shape[0] * shape[1]
    devices = tuple(Device("cpu", i) for i in range(count))
    return VariableMesh(shape, ("batch", "model"), devices, rule)


@pytest.mark.parametrize(
    "path, shape, axes",
    [
        ("embedding/embeddings", (1000, 64), ("model",)),
        ("ffn/up/kernel", (64, 256), (None, "model")),
        ("ffn/down/kernel", (256, 64), ("model",)),
        ("dense/kernel", (64, 64), (None, "model")),
        ("attention/query/kernel", (512, 8, 64), (None, "model")),
        ("attention/value/kernel", (512, 8, 64), (None, "model")),
        ("attention/attention_output/kernel", (8, 64, 512), ("model",)),
        # Six heads do not divide: the features do.
        ("attention/key/kernel", (512, 6, 64), ("model",)),
        ("conv/kernel", (3, 3, 64, 128), (None, None, None, "model")),
        ("odd/kernel", (7, 9), ()),
        # The longest axis does not divide, another one does.
        ("vocabulary/kernel", (64, 30001), ("model",)),
        ("scale", (), ()),
        ("empty", (0, 4), (None, "model")),
    ],
)
def test_auto_cuts(path, shape, axes) -> None:
    assert AUTO.axes(path, shape, 4) == axes


def test_fsdp_cuts_along_the_data_axis_and_a_model_axis() -> None:
    rule = FullyShardedLayouts("batch", 2, 0)
    assert rule.axes("kernel", (64, 256), 4) == (None, "batch")
    assert rule.axes("odd", (7,), 4) == ()
    both = FullyShardedLayouts("batch", 2, 0, model=AUTO)
    assert both.axes("kernel", (64, 256), 4) == ("batch", "model")
    assert both.axes("att/query/kernel", (512, 8, 64), 4) == ("batch", "model")
    # One axis of the variable is for one axis of the mesh.
    assert both.axes("bias", (256,), 4) == ("model",)
    assert both.axes("bias", (6,), 4) == ("batch",)
    # Small variables are not sharded.
    small = AutoLayouts("model", 4, min_shard_bytes=1024)
    assert small.axes("kernel", (32, 32), 4) == (None, "model")
    assert small.axes("kernel", (32, 28), 4) == ()


def test_patterns_match_whole_paths_and_at_most_one() -> None:
    rule = MappedLayouts({".*dense.*kernel": (None, "model"), "a/bias": ("model",)})
    assert rule.axes("x/dense_1/kernel", (4, 4), 4) == (None, "model")
    assert rule.axes("x/dense_1/kernel_2", (4, 4), 4) == ()
    assert rule.axes("a/bias", (4,), 4) == ("model",)
    text = r"'dense\(/kernel' in the layout map is no regular expression: missing"
    with pytest.raises(ValueError, match=text):
        MappedLayouts({"dense(/kernel": ("model",)})
    twice = MappedLayouts({".*kernel": ("model",), "dense.*": ("model",)})
    with pytest.raises(ValueError, match="matches 2 patterns"):
        twice.axes("dense/kernel", (4, 4), 4)


@pytest.mark.parametrize(
    "axes, problem",
    [
        (("model", None, None), "has 3 axes"),
        (("modle",), "no 'modle'"),
        (("model", "model"), "names an axis of the mesh twice"),
        ((None, "model"), "axis 1, 6, does not divide over the 4 devices"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(axes, problem) -> None:
    grid = mesh(MappedLayouts({"kernel": axes}))
    with pytest.raises(ValueError, match="Variable 'kernel' of shape") as caught:
        grid.layout("kernel", (8, 6))
    assert problem in str(caught.value)


PATHS = ["net/dense/kernel", "net/dense/bias", "net/ffn_out/kernel", "net/embed/table"]


def used(patterns: dict[str, Any], **options: Any) -> MappedLayouts:
    rule = MappedLayouts(patterns, **options)
    for path in PATHS:
        rule.find(path)
    return rule


def test_patterns_that_match_nothing_are_named_with_the_closest_paths() -> None:
    rule = used({".*dense/kernal": (None, "model"), r".*embed.*": ("model",)})
    with pytest.raises(ValueError, match=r"dense/kernal.*'net/dense/kernel'") as error:
        rule.check_matches()
    assert "embed" not in str(error.value)
    assert closest_paths(r"^.*ffn\.out/kernel$", PATHS)[0] == "net/ffn_out/kernel"
    # Those that matched a variable of any model are right.
    rule = used({".*dense/kernel": (None, "model"), "other/kernel": ("model",)})
    rule.find("other/kernel")
    rule.check_matches()
    used({"zzz": ("model",)}, allow_unmatched=True).check_matches()
    # Patterns of outputs count once layers are called.
    rule = used({".*dens/output": ("batch", "model")})
    rule.check_matches()
    rule.find("net/dense/output")
    with pytest.raises(ValueError, match=r"dens/output.*'net/dense/output'"):
        rule.check_matches()
