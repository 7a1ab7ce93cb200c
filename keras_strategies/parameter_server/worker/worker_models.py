"""Methods of Keras models in scheduled functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from keras_strategies.errors import ContextError
from keras_strategies.runtime.drivers import FitDriver
from keras_strategies.runtime.placement import VariableCopy

_STEP = (
    "its steps run on all workers. To schedule a step yourself, schedule a function "
    "that computes gradients with `ks.value_and_grad` and applies them with "
    "`optimizer.apply`, called by `strategy.run`."
)
_CALL = (
    "its steps run on all workers. In a scheduled function, call `model(x, "
    "training=False)` in a function that `strategy.run` calls."
)
_INSTEAD = {
    "compile": "what it sets here does not come back.",
    "fit": _STEP,
    "train_on_batch": _STEP,
    "evaluate": _CALL,
    "test_on_batch": _CALL,
    "predict": _CALL,
    "predict_on_batch": _CALL,
}


class WorkerModels(FitDriver):
    """Driver of models in scheduled functions: layer calls, no training methods."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        """Does nothing: `method` refuses what uses it."""

    def copies(self, variable: Any) -> list[VariableCopy]:
        return []

    def method(self, model: Any, name: str) -> contextlib.AbstractContextManager[None]:
        raise ContextError(
            f"`{name}` of model {model.name!r} was called in a scheduled function. A "
            "worker has the values of variables for one step at a time. Call "
            f"`model.{name}(...)` on the coordinator, without `schedule`: "
            f"{_INSTEAD[name]}"
        )
