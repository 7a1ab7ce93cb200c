"""Methods of strategies that save and load sharded checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from keras_strategies.errors import BackendError
from keras_strategies.keras_compat.models.building import build_optimizer
from keras_strategies.runtime import context
from keras_strategies.runtime.drivers import CheckpointDriver
from keras_strategies.runtime.engine import Feature, require
from keras_strategies.strategies.base.strategy_checks import StrategyChecks
from keras_strategies.timeline import recording
from keras_strategies.types import check_count


class StrategyCheckpoints(StrategyChecks):
    """Sharded checkpoints of a strategy's models."""

    def save_sharded(
        self, model: Any, directory: str | os.PathLike[str], keep: int = 1
    ) -> int:
        """Saves a model's state without gathering sharded variables.

        Each process writes the shards of its devices. Until a checkpoint is complete,
        and if a process is killed, the previous one is the latest. By Orbax on JAX,
        which needs the extra `checkpoint`, and by `torch.distributed.checkpoint` on
        Torch; each reads its own. The metadata of Torch's are pickled: load only
        checkpoints that you trust.

        Args:
            model: a built `keras.Model` of this strategy. Its variables are saved,
                seed generators among them, and its optimizer's.
            directory: path to a directory for the model's checkpoints; created if it
                does not exist.
            keep: int, the number of checkpoints to keep, 1 or more.

        Returns:
            int, the number of the checkpoint, which counts from 1.

        Raises:
            RuntimeError: on TensorFlow, on JAX without Orbax, or if the model was not
                created in this strategy's scope.
            ValueError: if `keep` is not a positive int.

        Example:

        >>> strategy.save_sharded(model, "checkpoints")
        >>> other_strategy.load_sharded(same_model_made_there, "checkpoints")
        """
        check_count("keep", keep, 1, "a number of checkpoints,")
        self._check_owns(model, "save")
        with recording.SAVE, context.entered(self):
            return self._checkpoints.save_sharded(model, Path(directory), keep)

    def load_sharded(self, model: Any, directory: str | os.PathLike[str]) -> int:
        """Loads the latest complete checkpoint of `save_sharded`.

        Each device reads only its shards, whichever strategy saved the checkpoint.

        Args:
            model: a built `keras.Model` of this strategy with the same variables. Its
                optimizer is built, if it is not yet.
            directory: path to the directory.

        Returns:
            int, the number of the checkpoint.

        Raises:
            ValueError: if there is no finished checkpoint, or one of another model.
            RuntimeError: as for `save_sharded`.
        """
        self._check_owns(model, "load")
        with context.entered(self):
            build_optimizer(model)
            return self._checkpoints.load_sharded(model, Path(directory))

    @property
    def _checkpoints(self) -> CheckpointDriver:
        require(self._engine, Feature.SHARDED_CHECKPOINTS)
        driver = self._drivers.checkpoints
        if driver is None:
            raise BackendError(
                f"{self!r} has no sharded checkpoints: its variables are in other "
                "processes. Use `model.save` and `keras.models.load_model`."
            )
        return driver
