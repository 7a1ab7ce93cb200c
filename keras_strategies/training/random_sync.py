"""Synchronization of random numbers between workers."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.input.batches import loaded
from keras_strategies.runtime.engine import Engine


def sync_random_numbers(engine: Engine, group: WorkerGroup) -> None:
    """Copies the chief's random states: Python's, NumPy's and the framework's.

    Keras draws seeds of layers and initializers from Python's generator, and shuffles
    with NumPy's or the framework's, so workers with the same states create the same
    weights and the same batches. A `torch.utils.data.DataLoader` shuffles with Torch's
    on every backend.
    """
    own = random_numbers(engine) if group.is_chief else None
    set_random_numbers(engine, group.broadcast("random numbers", own))


def random_numbers(engine: Engine) -> dict[str, Any]:
    """The states of all generators, as JSON; Torch's where it has been imported."""
    found: Any = np.random.get_state(legacy=False)
    state = {
        **found,
        "state": {**found["state"], "key": found["state"]["key"].tolist()},
    }
    found = {
        "python": random.getstate(),
        "numpy": state,
        "backend": base64.b64encode(engine.random_state).decode(),
        "of": engine.name,
    }
    torch = loaded("torch")
    if torch is not None:
        own = torch.get_rng_state().numpy().tobytes()
        found["torch"] = base64.b64encode(own).decode()
    return found


def set_random_numbers(engine: Engine, state: dict[str, Any]) -> None:
    """Restores what `random_numbers` returned; of another backend, all but its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    key = np.asarray(numpy["state"]["key"], np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch = loaded("torch")
    if torch is not None and "torch" in state:
        own = np.frombuffer(base64.b64decode(state["torch"]), np.uint8)
        torch.set_rng_state(torch.from_numpy(own.copy()))
    if state["of"] == engine.name:
        engine.random_state = base64.b64decode(state["backend"])
