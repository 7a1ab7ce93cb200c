"""Attributes of Keras that are replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What has been replaced: its owner, its name, and what it was.
installed: list[tuple[Any, str, Any]] = []


def base_trainer() -> Any:
    """`Trainer` of Keras 3.15, which 3.16 calls `BaseTrainer`."""
    from keras.src.trainers import trainer

    return getattr(trainer, "BaseTrainer", None) or trainer.Trainer


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces one attribute of a Keras class for as long as hooks are installed."""
    original = owner.__dict__[name]
    installed.append((owner, name, original))
    setattr(owner, name, wrap(original))


def is_patched(owner: Any) -> bool:
    """Whether an attribute of a class or module of Keras has been replaced."""
    return any(patched is owner for patched, _, _ in installed)


def uninstall() -> None:
    """Takes every hook out again, for tests."""
    while installed:
        owner, name, original = installed.pop()
        setattr(owner, name, original)


def is_installed() -> bool:
    return bool(installed)
