"""The devices of the tests' strategies: virtual CPUs, or those of KS_TEST_DEVICES.

That is `simulated:4`, on Torch, for four accelerators of `python_accelerator`, or
`gpu:4` for as many GPUs.
"""

from __future__ import annotations

import os

#: What names the devices.
VARIABLE = "KS_TEST_DEVICES"
_TORCH = "keras.src.backend.torch"
_kind, _, _count = os.environ.get(VARIABLE, "cpu:4").partition(":")
#: The kind of the devices in names, and how many there are.
KIND = "cpu" if _kind == "cpu" else "gpu"
COUNT = int(_count)


def install() -> None:
    """Adds simulated accelerators to this process, under the names of GPUs."""
    if _kind != "simulated":
        return
    from harness import python_accelerator
    from keras_strategies.engines.torch import devices
    from keras_strategies.keras_compat.patching import resolved

    python_accelerator.install(COUNT)
    core = resolved(f"{_TORCH}.core") or resolved(f"{_TORCH}.ops.core")
    core.DEFAULT_DEVICE = python_accelerator.KIND  # Of Keras, as "cuda" with a GPU.
    devices._TORCH_KIND["gpu"] = python_accelerator.KIND
    devices._KIND[python_accelerator.KIND] = "gpu"
