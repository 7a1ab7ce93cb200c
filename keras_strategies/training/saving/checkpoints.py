"""Checkpoints of custom loops: models, optimizers, metrics and counters.

A checkpoint is one file, an archive (`archives.py`). Its
format does not depend on backend, strategy or number of replicas and shards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_strategies.engines import get_engine
from keras_strategies.errors import (
    CheckpointError,
    ContextError,
    DamagedCheckpointError,
    InvalidArgumentError,
)
from keras_strategies.keras_compat.models.building import build_optimizer
from keras_strategies.keras_compat.optimizers.optimizer_parts import is_optimizer
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.runtime import context
from keras_strategies.runtime.state.model_values import in_numpy_dtype
from keras_strategies.timeline import recording
from keras_strategies.training.random_sync import random_numbers, set_random_numbers
from keras_strategies.training.saving.archives import (
    LazyArray,
    check_stored,
    naming_damage,
    open_archive,
    with_arrays,
    write_archive,
)
from keras_strategies.training.saving.atomic_files import atomic_file
from keras_strategies.user_warnings import warn_user


class Checkpoint:
    """The state of a training loop, saved to one file and restored from it.

    The file is independent of backend, strategy and number of replicas: what two Torch
    replicas saved, eight JAX devices restore. It has the values of all variables,
    including optimizer slots and states of seed generators, and the random states of
    Python, NumPy and the backend. With several workers each calls `save` and
    `restore`; the chief writes, to a folder that all workers can read.

    Args:
        objects: the objects to save, by name: models, layers, optimizers, metrics, seed
            generators, `keras.Variable`s, and dicts, lists and tuples of these. With a
            compiled model its optimizer is saved too. Counters, such as the step, are
            `keras.Variable(0, dtype="int64", trainable=False)`.

    Raises:
        ValueError: for objects without variables, such as Python numbers.

    Example:

    >>> checkpoint = ks.Checkpoint(model=model, optimizer=optimizer, step=step)
    >>> manager = ks.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
    >>> manager.restore_or_initialize()
    >>> while int(step) < 1000:
    ...     train_step(next(batches))
    ...     step.assign_add(1)
    ...     if int(step) % 100 == 0:
    ...         manager.save()
    """

    def __init__(self, **objects: Any):
        self._objects = dict(_named_objects(objects))
        if not self._objects:
            raise InvalidArgumentError(
                "A checkpoint needs objects by name, as in "
                "`ks.Checkpoint(model=model, optimizer=optimizer)`. Received none."
            )

    def save(self, path: str | os.PathLike[str]) -> str:
        """Saves all objects to a file, which replaces one of that name when complete.

        Args:
            path: path of the file; its folders are made.

        Returns:
            str, the path.

        Raises:
            OSError: if the file cannot be written; an earlier file stays as it was.
            RuntimeError: inside `run`.
        """
        written = self.write(path)
        strategy = self._strategy()
        if strategy is not None and strategy.workers is not None:
            strategy.workers.group.barrier(f"the save of checkpoint {written!r}")
        return written

    def write(self, path: str | os.PathLike[str]) -> str:
        """As `save`, without waiting for the other workers."""
        self._check_context("save")
        target = Path(path)
        strategy = self._strategy()
        with recording.SAVE, _scope_of(strategy):
            self._prepare()
            if self.is_written_here:
                self._write(target)
            elif strategy.placement.mesh is not None:
                # Variables that are sharded over workers are read by all of them.
                for variable in self._all_variables():
                    _value_of(variable)
        return str(target)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restores all objects from a file, after checking that it fits.

        Models must be built. An optimizer that is not built yet is built for the only
        model of the checkpoint. Other objects in the file are ignored, so that a model
        can be restored alone.

        Args:
            path: path of a file that `save` has written.

        Raises:
            ValueError: if there is no such file, it is damaged, lacks an object, or
                has other variables than the object. No variable has changed then.
            RuntimeError: inside `run`.
        """
        self._check_context("restore")
        file, name = Path(path), f"Checkpoint {str(path)!r}"
        if not file.is_file():
            raise CheckpointError(f"{name} does not exist.")
        with (
            _scope_of(self._strategy()),
            open_archive(file, "checkpoint", name) as contents,
        ):
            with naming_damage(name):
                for entry in itertools.chain(*contents["objects"].values()):
                    check_stored(entry["value"], entry)
                random = with_arrays(contents["random"])
                random["of"], random["python"], random["numpy"], random["backend"]
            self._prepare(contents["objects"])
            for variable, entry in self._matched(contents["objects"], str(path)):
                variable.assign(in_numpy_dtype(entry["value"].read()))
            set_random_numbers(get_engine(), random)

    @property
    def is_written_here(self) -> bool:
        """bool, whether this process writes the file: the chief of several workers."""
        strategy = self._strategy()
        if strategy is None or strategy.workers is None:
            return True
        return bool(strategy.workers.group.is_chief)

    # For `PreemptionCheckpointHandler`, as `tf.train.Checkpoint` has it.
    read = restore

    def _check_context(self, method: str) -> None:
        in_trace = current_stateless_scope() is not None
        if context.current_replica() is not None or in_trace:
            raise ContextError(
                f"`Checkpoint.{method}` was called inside `run` or a `ks.function`. "
                "Call it outside, between two steps."
            )

    def _strategy(self) -> Any:
        """The strategy of the objects; None without one."""
        for value in (*self._objects.values(), *self._all_variables()):
            strategy = strategy_of(value)
            if strategy is not None:
                return strategy
        return None

    def _prepare(self, saved: Mapping[str, Any] | None = None) -> None:
        """Builds optimizers, and synchronizes variables inside `fit` on JAX."""
        models = [v for v in self._objects.values() if isinstance(v, keras.Model)]
        for model in models:
            build_optimizer(model)
            get_engine().sync_variables(model)
        layers = [v for v in self._objects.values() if isinstance(v, keras.Layer)]
        for name, value in self._objects.items():
            if not is_optimizer(value) or value.built:
                continue
            has_slots = len((saved or {}).get(name, ())) > len(value.variables)
            if has_slots and len(layers) == 1 and layers[0].built:
                value.build(layers[0].trainable_variables)

    def _all_variables(self) -> list[Any]:
        return [v for value in self._objects.values() for v in _variables_of(value)]

    def _write(self, target: Path) -> None:
        random = random_numbers(get_engine())
        objects = {
            name: [_entry(variable) for variable in _variables_of(value)]
            for name, value in self._objects.items()
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as part:
            write_archive(part, "checkpoint", {"objects": objects, "random": random})

    def _matched(self, saved: Mapping[str, Any], path: str) -> list[tuple[Any, Any]]:
        """Pairs of variables and their entries in the file."""
        pairs: list[tuple[Any, Any]] = []
        for name, value in self._objects.items():
            if name not in saved:
                raise CheckpointError(
                    f"Checkpoint {path!r} has no object {name!r}. It has "
                    f"{', '.join(map(repr, saved))}. Use the names that were saved."
                )
            own, entries = _variables_of(value), saved[name]
            found = [f"{e['path']} {tuple(e['shape'])}" for e in entries]
            if len(own) != len(entries):
                raise CheckpointError(
                    f"{name!r} has {len(own)} variables, and checkpoint {path!r} has "
                    f"{len(entries)} of it: {', '.join(found)}. Create it as it was "
                    "when saved; build models, optimizers "
                    "(`optimizer.build(model.trainable_variables)`) and metrics "
                    "before `restore`."
                )
            for variable, entry in zip(own, entries, strict=True):
                if tuple(variable.shape) != tuple(entry["shape"]):
                    raise CheckpointError(
                        f"Variable {variable.path!r} of {name!r} has the shape "
                        f"{tuple(variable.shape)}, and checkpoint {path!r} has "
                        f"{entry['path']!r} of shape {tuple(entry['shape'])} in its "
                        f"place. Create {name!r} as it was when saved."
                    )
                pairs.append((variable, entry))
        return pairs

    def __repr__(self) -> str:
        names = ", ".join(self._objects)
        return f"<{type(self).__name__} of {names}>"


class CheckpointManager:
    """Numbered checkpoints in a folder, of which the last few are kept.

    Args:
        checkpoint: `ks.Checkpoint`.
        directory: path of the folder; made with the first checkpoint.
        max_to_keep: int, how many checkpoints are kept, 1 or more; None for all.
        checkpoint_name: str, the prefix of the files' names.

    Raises:
        ValueError: if `checkpoint` is not a `Checkpoint`, or `max_to_keep` is not a
            positive int.

    Example:

    >>> manager = ks.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
    >>> manager.save()
    'checkpoints/ckpt-1.ckpt'
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        checkpoint_name: str = "ckpt",
    ):
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidArgumentError(
                f"`checkpoint` must be a `ks.Checkpoint`. Received: {checkpoint!r}"
            )
        is_count = isinstance(max_to_keep, int) and not isinstance(max_to_keep, bool)
        if max_to_keep is not None and (not is_count or max_to_keep < 1):
            raise InvalidArgumentError(
                "`max_to_keep` must be a number of checkpoints, 1 or more, or None "
                f"for all. Received: {max_to_keep!r}"
            )
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name

    @property
    def checkpoint(self) -> Checkpoint:
        """The `Checkpoint` that is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """str, the folder."""
        return str(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """list of str, the paths of the checkpoints in the folder, oldest first."""
        return [str(path) for _, path in sorted(self._numbered())]

    @property
    def latest_checkpoint(self) -> str | None:
        """str, the path of the last checkpoint; None without checkpoints."""
        found = self.checkpoints
        return found[-1] if found else None

    def save(self, checkpoint_number: int | None = None) -> str:
        """Saves a checkpoint and removes those beyond `max_to_keep`.

        Args:
            checkpoint_number: int, its number; None for the one after the last.

        Returns:
            str, its path.

        Raises:
            OSError: if it cannot be written; earlier checkpoints are intact.
        """
        if checkpoint_number is None:
            checkpoint_number = max((n for n, _ in self._numbered()), default=0) + 1
        path = self._directory / f"{self._name}-{int(checkpoint_number)}.ckpt"
        saved = self._checkpoint.save(path)
        if self._max_to_keep is not None and self._checkpoint.is_written_here:
            others = [other for _, other in sorted(self._numbered()) if other != path]
            for old in others[: max(0, len(others) + 1 - self._max_to_keep)]:
                old.unlink(missing_ok=True)
        return saved

    def restore_or_initialize(self) -> str | None:
        """Restores the last checkpoint that can be read.

        Returns:
            str, its path; None if there is none, at the beginning of training.

        Raises:
            ValueError: if the checkpoint is of other objects, or all are damaged.
        """
        error: CheckpointError | None = None
        for path in reversed(self.checkpoints):
            try:
                self._checkpoint.restore(path)
            except DamagedCheckpointError as damaged:
                warn_user(f"{damaged} Using the previous checkpoint.")
                error = damaged
            else:
                return path
        if error is not None:
            raise error
        return None

    def _numbered(self) -> list[tuple[int, Path]]:
        pattern = re.compile(re.escape(self._name) + r"-(\d+)\.ckpt")
        if not self._directory.is_dir():
            return []
        matches = ((pattern.fullmatch(p.name), p) for p in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in matches if match]

    def __repr__(self) -> str:
        count = len(self.checkpoints)
        return f"<{type(self).__name__} of {count} in {self.directory!r}>"


def _named_objects(structure: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The objects in a structure, by names such as `optimizers/0`."""
    if isinstance(structure, Mapping):
        items: Any = structure.items()
    elif isinstance(structure, (list, tuple)):
        items = enumerate(structure)
    else:
        _variables_of(structure, name)
        yield name, structure
        return
    for key, value in items:
        yield from _named_objects(value, f"{name}/{key}" if name else str(key))


def _variables_of(value: Any, name: str = "") -> list[Any]:
    if isinstance(value, keras.Variable):
        return [value]
    if isinstance(value, keras.random.SeedGenerator):
        return [value.state]
    is_layer = isinstance(value, (keras.Layer, keras.metrics.Metric))
    if not is_layer and not is_optimizer(value):
        raise InvalidArgumentError(
            f"{name!r} of a checkpoint must be a model, layer, optimizer, metric, "
            "seed generator or `keras.Variable`, or a dict, list or tuple of these. "
            "A counter is `keras.Variable(0, dtype='int64', trainable=False)`. "
            f"Received: {value!r} of type {type(value).__name__}"
        )
    found = list(value.variables)
    optimizer = getattr(value, "optimizer", None)
    if isinstance(value, keras.Model) and optimizer is not None:
        found += optimizer.variables
    return list({id(variable): variable for variable in found}.values())


def _value_of(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)


def _entry(variable: Any) -> dict[str, Any]:
    """A variable in the contents of a file; it is read when it is written."""
    return {
        "path": variable.path,
        "shape": list(variable.shape),
        "dtype": variable.dtype,
        "value": LazyArray(lambda: _value_of(variable)),
    }


def _scope_of(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if strategy is None else strategy.scope()
