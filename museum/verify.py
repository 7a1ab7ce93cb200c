"""Scripts as cases of `ks.verify_processes`: is the bug found, and named?"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The functions of `museum.common` that scripts of other frameworks end with.
ENTRIES = ("exhibit_ranks", "exhibit_scopes")


def verifiable(name: str) -> bool:
    """Whether a script trains in a way that processes or devices can be compared."""
    text = (Path(__file__).parent / f"{name}.py").read_text()
    return any(f"\n{entry}(" in text for entry in ENTRIES)


class Exhibit:
    """The training of a script, for `ks.verify_processes`; its number is observed.

    Args:
        name: str, the script.
    """

    def __init__(self, name: str):
        self.name = self.__name__ = name

    def load(self) -> Callable[[], Any]:
        """Imports the script without its measurements."""
        common = importlib.import_module("museum.common")
        found: list[Callable[[], Any]] = []
        steps = {
            "exhibit_ranks": lambda doc, step, ours: found.append(lambda: _rank(step)),
            "exhibit_scopes": lambda doc, train: found.append(lambda: _scope(train)),
            "exhibit": lambda *measured: None,
        }
        originals = {name: getattr(common, name) for name in steps}
        try:
            for name, step in steps.items():
                setattr(common, name, step)
            importlib.import_module(f"museum.{self.name}")
        finally:
            for name, original in originals.items():
                setattr(common, name, original)
        if found:
            self._train = found[0]
        return self._train

    def __call__(self) -> None:
        import keras_strategies as ks

        ks.observe(number=self._train())


def _rank(step: Callable[[int, int], Any]) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return step(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _scope(train: Callable[[Any], Any]) -> Any:
    import tensorflow as tf

    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    if len(names) == 1:
        return train(contextlib.nullcontext())
    return train(tf.distribute.MirroredStrategy(names).scope())
