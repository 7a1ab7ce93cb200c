"""`ks.verify`: is training under a strategy equal to that on one device?"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.communication.checksums import checksum
from keras_strategies.communication.communicator import is_fixed
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.rows.declarations import is_declared
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.default import DefaultStrategy
from keras_strategies.strategies.one_device import OneDeviceStrategy
from keras_strategies.training.resume.compiled_settings import (
    changed_settings,
    compiled_settings,
)
from keras_strategies.verification.arguments import (
    check_arguments,
    check_interruption,
    check_kill,
)
from keras_strategies.verification.batches import Batch, data_problem
from keras_strategies.verification.causes import Situation
from keras_strategies.verification.comparison import (
    Precision,
    differing,
    disturbed,
    few,
    gaps,
    relative_gap,
)
from keras_strategies.verification.copies import differing_copies
from keras_strategies.verification.interruptions import resumed, worker_kill
from keras_strategies.verification.report import (
    Difference,
    VerificationReport,
    versions,
)
from keras_strategies.verification.trainings import (
    Key,
    Observed,
    Script,
    Step,
    Training,
)


def verify(
    build: Callable[[], Any],
    data: Any,
    strategy: Strategy,
    steps: int = 4,
    tolerance: float | None = None,
    *,
    step: Step | None = None,
    seed: int = 0,
    resume_after: int | None = None,
    kill_after: int | None = None,
) -> VerificationReport:
    """Trains a model on one device and under a strategy, and compares every step.

    Both trainings begin with the same weights, data and random numbers. If a value
    differs by more than the noise of one device, the step is repeated from its state
    with outputs of layers and gradients observed, and experiments on one device look
    for the cause. Sets the seed of `keras.utils.set_random_seed`.

    Args:
        build: callable without arguments that makes the model and compiles it; called
            several times, outside of any scope and in that of the strategy.
        data: `(x, y)` or `(x, y, sample_weight)`, arrays of shape `(rows, ...)` or
            structures of them; a dict of arguments of `fit`; a dataset of global
            batches that can be read again; or a callable without arguments that
            returns one of these, called for each training.
        strategy: the strategy, with one replica or more. On several workers, each of
            them calls `verify`; with parameter servers the coordinator does, and
            `max_staleness` is 0.
        steps: int, the number of steps to compare.
        tolerance: float, the difference relative to the largest value of a tensor that
            counts as equal; None for 2e-5 in float32, and more in lower precisions.
        step: callable of `(strategy, model, batch)` that takes a step of a custom loop
            with a distributed batch and `model.optimizer`, and returns the loss or a
            dict of scalars; None for `fit`.
        seed: int, the seed of weights, data and random numbers.
        resume_after: int, the step after which `fit` under the strategy is interrupted
            as by Ctrl-C, and continued by `ks.callbacks.Resume` with a new model;
            None for never.
        kill_after: int, the step of `fit` under the strategy after which its last
            elastic worker kills its own process by SIGKILL; the others continue, and
            `verify` returns on them. Without elastic workers what is in memory is
            dropped, and `ks.callbacks.Resume` continues from its last snapshot with a
            new model. None for never.

    Returns:
        A `VerificationReport`, true if all values are equal.

    Raises:
        ValueError: for invalid arguments, data that can be read once only, or if
            `build` returns no compiled model.
        RuntimeError: in the scope of a strategy.

    Example:

    >>> report = ks.verify(make_model, (x, y), ks.MirroredStrategy())
    >>> print(report)
    >>> report.save("verified.json")
    """
    check_arguments(build, strategy, steps, tolerance)
    check_interruption("resume_after", resume_after, steps, step)
    check_interruption("kill_after", kill_after, steps, step)
    check_kill(kill_after, resume_after, strategy)
    script = Script(
        build,
        data,
        step,
        steps,
        seed,
        resume_after,
        kill_after,
        is_elastic=not is_fixed(strategy.workers),
        on_servers=strategy.drivers.servers is not None,
    )
    return _Verification(script, strategy, tolerance).report()


def parts_of(strategy: Strategy) -> int:
    """The number of replicas, or of workers of parameter servers."""
    if strategy.drivers.servers is not None:
        return len(strategy.extended.worker_devices)
    return strategy.num_replicas_in_sync


def reference_of(strategy: Strategy) -> Strategy:
    """The strategy of one device that draws the random numbers of another."""
    partitioned = strategy.random_numbers == "partitioned"
    if strategy.drivers.servers is not None:
        return DefaultStrategy()
    if keras.backend.backend() == "torch" and partitioned:
        return OneDeviceStrategy(str(strategy.placement.replicas[0]))
    return DefaultStrategy()


@dataclass
class _Verification:
    script: Script
    strategy: Strategy
    tolerance: float | None

    def __post_init__(self) -> None:
        self.reference = reference_of(self.strategy)
        # Before workers are lost.
        self.replicas = parts_of(self.strategy)
        self.alone = Training(self.script, self.reference)
        self.initial = self.alone.state()
        self.own = Training(self.script, self.strategy, self.initial)
        self.precision = Precision.of(self.alone.model, self.tolerance)
        self.experiments: list[Training] = []
        self.alone_steps: list[Observed] = []
        self.notes: list[str] = []
        self.evidence = self.cause = ""
        self.checksums: dict[str, str] = {}

    def report(self) -> VerificationReport:
        found = list(self._differences())
        taken = {"on one device": self.alone.steps_taken}
        taken["under the strategy"] = self.own.steps_taken
        taken["in experiments"] = sum(each.steps_taken for each in self.experiments)
        backend = keras.backend.backend()
        return VerificationReport(
            repr(self.strategy).strip("<>"),
            "Keras without a strategy"
            if isinstance(self.reference, DefaultStrategy)
            else repr(self.reference).strip("<>"),
            self.script.steps,
            self.precision.tolerance,
            tuple(found),
            self.cause,
            self.evidence,
            tuple(self.notes),
            taken,
            self.script.seed,
            self.checksums,
            versions({backend: importlib.import_module(backend).__version__}),
        )

    def _differences(self) -> Iterator[Difference]:
        """The differences of the first part of the comparison that has any."""
        for part in (self._of_model, self._of_data, self._of_declarations):
            if found := part():
                yield found
                return
        yield from self._of_steps()

    def _found(self, cause: str, evidence: str = "") -> None:
        self.cause, self.evidence = cause, evidence

    def _of_model(self) -> Difference | None:
        alone, own = self.alone, self.own
        one, other = (
            [(kind, tuple(v.shape)) for kind, _, v in each.variables()]
            for each in (alone, own)
        )
        if one != other:
            self._found("model_depends_on_replicas")
            texts = (f"{len(each)} variables" for each in (one, other))
            if len(one) == len(other):
                i = next(i for i in range(len(one)) if one[i] != other[i])
                texts = (str(each[i][1]) for each in (one, other))
            return _difference("setting", "model", *texts)
        trained = [[v.trainable for v in t.model.variables] for t in (alone, own)]
        if trained[0] != trained[1]:
            self._found("variable_left_out", "it is not trainable under the strategy")
            i = next(i for i, v in enumerate(trained[0]) if v != trained[1][i])
            texts = (f"trainable={each[i]}" for each in trained)
            return _difference("setting", alone.model.variables[i].path, *texts)
        layers = map(sublayers, (alone.model, own.model))
        for layer, found in zip(*layers, strict=False):
            policies = layer.dtype_policy.name, found.dtype_policy.name
            if policies[0] != policies[1]:
                self._found("autocast_lost")
                return _difference("dtype policy", layer.name, *policies)
        return self._of_settings()

    def _of_settings(self) -> Difference | None:
        if not self.alone.model.compiled:
            return None
        settings = [compiled_settings(t.model) for t in (self.alone, self.own)]
        for name, value in changed_settings(settings[1], settings[0]).items():
            is_rate = name == "learning_rate"
            cause = "learning_rate_scaled" if is_rate else "setting_depends_on_replicas"
            self._found(cause)
            return _difference("setting", name, str(value), str(settings[1].get(name)))
        return None

    def _of_data(self) -> Difference | None:
        trainings = (self.alone, self.own)
        for name, training in zip(("one device", "strategy"), trainings, strict=True):
            digest = checksum(
                np.array([b.leaf_checksums() for b in training.batches[:1]])
            )
            self.checksums[f"first batch, {name}"] = f"{digest:08x}"
        problem = data_problem(
            self.alone.batches,
            self.own.batches,
            self.replicas,
            lambda is_own: trainings[is_own].batches_again(_MOST_BATCHES),
        )
        if problem is None:
            return None
        step, text, cause = problem
        self._found(cause)
        return Difference(step, "batch", "data", float("inf"), None, "", text)

    def _experiment(
        self, strategy: Any, state: Observed | None = None, keeps: bool = True
    ) -> Training:
        batches = self.alone.batches
        training = Training(self.script, strategy, state, keeps, batches)
        self.experiments.append(training)
        return training

    def _of_declarations(self) -> Difference | None:
        """Calls declared layers with a batch, and with its halves, on one device."""
        batch = self.alone.batches[0]
        layers = sublayers(self.alone.model)
        if batch.rows < 2 or not any(map(is_declared, layers)):
            return None
        middle = batch.rows // 2
        every, half, rest = (
            self._outputs(self.reference, self.initial, part, False)
            for part in (batch, batch.part(0, middle), batch.part(middle, batch.rows))
        )
        if not (every and half and rest):
            return None
        for key, value in every[0].values.items():
            parts = [each[0].values[key] for each in (half, rest)]
            joined = np.concatenate(parts)
            gap = relative_gap(value, joined, 0.0)
            if is_declared(every[1][key[1]]) and gap > 1e-3:
                self._found("wrong_declaration", "halves of a batch give other rows")
                name = every[0].names[key]
                texts = few(value), few(joined)
                return Difference(0, "declaration", name, gap, None, *texts)
        return None

    def _outputs(
        self, strategy: Any, state: Observed, batch: Batch, training: bool
    ) -> tuple[Observed, list[Any]] | None:
        trial = self._experiment(strategy, state, False)
        try:
            return trial.outputs(batch, training)
        except Exception as error:  # Of code that cannot be called outside of a step.
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            note = f"Outputs of layers were not observed ({text})."
            if note not in self.notes:
                self.notes.append(note)
            return None

    # Steps.

    def _noise(self, gap: list[dict[Key, float]]) -> list[dict[Key, float]]:
        """What differs on one device, from weights that differ in their last digits.

        Args:
            gap: the differences of the strategy, for each step.

        Returns:
            The largest noise up to each step; none if nothing needs it.
        """
        tolerance = self.precision.tolerance
        if not any(any(differing(each, {}, tolerance)) for each in gap):
            return [{} for _ in gap]
        start = disturbed(self.initial, self.precision.disturbance)
        found = self._experiment(self.reference, start).train(self.script.steps)
        noise: list[dict[Key, float]] = []
        for i, each in enumerate(found):
            before = noise[-1] if noise else {}
            own = self._gaps(i, each, start)
            noise.append({k: max(v, before.get(k, 0.0)) for k, v in own.items()})
        return noise

    def _gaps(
        self, index: int, found: Observed, start: Observed | None = None
    ) -> dict[Key, float]:
        """Differences from one device after a step of a training, by its index."""
        one, step = self.alone_steps[index], index + 1
        return gaps(one, found, self.precision, self.initial, step, start)

    def _of_steps(self) -> Iterator[Difference]:
        alone = self.alone_steps = self.alone.train(self.script.steps)
        found = self._of_strategy()
        self._add_checksums(alone[-1], found[-1])
        if len(alone) != len(found):
            self._found("data_depends_on_replicas")
            texts = f"{len(alone)} steps", f"{len(found)} steps"
            yield _difference("batch", "data", *texts)
            return
        every_gap = [self._gaps(i, each) for i, each in enumerate(found)]
        every_noise = self._noise(every_gap)
        repeated: set[bool] = set()
        for i, (one, other) in enumerate(zip(alone, found, strict=True)):
            gap, noise = every_gap[i], every_noise[i]
            keys = list(differing(gap, noise, self.precision.tolerance))
            if keys and max(noise.values(), default=0.0) > _CHAOS:
                noise = self._more_noise(i, noise)
                keys = list(differing(gap, noise, self.precision.tolerance))
            large = differing(gap, {}, self.precision.tolerance)
            hidden = {key[0] for key in large if noise.get(key, 0.0) > _LARGE_NOISE}
            is_of_logs = bool(hidden & {"loss", "metric"})
            if not keys and hidden and is_of_logs not in repeated:
                # As large as the difference: is it noise, or does nothing repeat? It is
                # asked again, once, when the logs have such noise.
                repeated.add(is_of_logs)
                training = self._experiment(self.reference, self.initial)
                again_gap = self._gaps(i, training.train(i + 1)[i])
                keys = list(differing(again_gap, {}, self.precision.tolerance))
            if keys:
                before = alone[i - 1] if i else self.initial
                yield from self._localized(i, before, keys, one, other, gap, noise)
                return
        if changed := self._of_settings():
            yield changed
        yield from self._of_copies()

    def _more_noise(self, index: int, noise: dict[Key, float]) -> dict[Key, float]:
        """The most noise of a step in several trainings, each disturbed otherwise."""
        for seed in range(1, 1 + _SAMPLES):
            start = disturbed(self.initial, self.precision.disturbance, seed)
            found = self._experiment(self.reference, start).train(index + 1)[index]
            gap = self._gaps(index, found, start)
            noise = noise | {k: max(noise.get(k, 0.0), gap[k]) for k in gap}
        return noise

    def _of_strategy(self) -> list[Observed]:
        script = self.script
        if script.interrupted_after is None:
            return self.own.train(script.steps)
        if script.is_elastic:
            kill = worker_kill(script.interrupted_after, self.strategy.workers)
            return self.own.train(script.steps, [kill])
        makes = (self._fresh(), self.own)
        return resumed(script, iter(makes).__next__)

    def _fresh(self) -> Training:
        training = Training(self.script, self.strategy, self.initial)
        self.experiments.append(training)
        return training

    def _is_lost_at_resume(self, index: int) -> bool:
        """Whether a step equals that of one device without the interruption."""
        if not self.script.is_resumed:
            return False
        other = self._fresh().train(self.script.steps)[index]
        gap = self._gaps(index, other)
        return not any(differing(gap, {}, self.precision.tolerance))

    def _of_copies(self) -> Iterator[Difference]:
        variables = [v for kind, _, v in self.own.variables() if kind in _KEPT]
        for name, one, other in differing_copies(self.strategy, variables):
            self._found("copies_differ")
            gap = relative_gap(one, other, 0.0)
            steps = self.script.steps
            yield Difference(steps, "copy", name, gap, None, few(one), few(other))

    def _localized(
        self,
        index: int,
        before: Observed,
        keys: list[Key],
        one: Observed,
        other: Observed,
        gap: dict[Key, float],
        noise: dict[Key, float],
    ) -> Iterator[Difference]:
        """Repeats the step from its state, with outputs and gradients observed."""
        if self._is_lost_at_resume(index):
            after = self.script.interrupted_after
            self._found(
                "lost_at_resume", f"equal without an interruption after {after}"
            )
            for key in keys:
                texts = few(one.values[key]), few(other.values[key])
                name, size = one.names[key], gap[key]
                yield Difference(index + 1, key[0], name, size, noise.get(key), *texts)
            return
        batch = self.alone.batches[index % len(self.alone.batches)]
        noisy = disturbed(before, self.precision.disturbance)
        states = (
            (self.reference, before),
            (self.strategy, before),
            (self.reference, noisy),
        )
        outputs = []
        if self.script.on_servers:
            self.notes.append("Outputs of layers on servers' workers are not observed.")
        else:
            outputs = [self._outputs(s, state, batch, True) for s, state in states[:2]]
        # A model in the scope of a strategy is of a subclass.
        kinds = [
            each
            and [isinstance(layer, keras.Model) or type(layer) for layer in each[1]]
            for each in outputs
        ]
        if kinds and kinds[0] != kinds[1]:
            if all(kinds):
                self.notes.append("Outputs of layers were called in another order.")
            outputs = []
        elif outputs and all(outputs):
            outputs.append(self._outputs(self.reference, noisy, batch, True))
        trials = [self._experiment(s, state, False).step(batch) for s, state in states]
        found: list[tuple[Key, float, float, Observed, Observed]] = []
        for observed in ([each[0] for each in outputs if each], trials):
            if len(observed) < 3:
                continue
            a, b, noisy_one = observed
            own = gaps(a, b, self.precision)
            own_noise = gaps(a, noisy_one, self.precision)
            for key in differing(own, own_noise, self.precision.tolerance):
                found.append((key, own[key], own_noise[key], a, b))
        if not found:
            found = [(key, gap[key], noise.get(key, 0.0), one, other) for key in keys]
        first = found[0]
        situation = Situation(
            self.script,
            self.reference,
            before,
            batch,
            first[3],
            first[4],
            self.replicas,
            self.precision,
        )
        try:
            self._found(*situation.cause(first[0]))
        except Exception as error:  # Of the script's code, with parts of a batch.
            text = f"an experiment failed: {type(error).__name__}: {error}"
            self._found("unknown", text.splitlines()[0])
        for key, size, own_size, a, b in found:
            other_value = b.values.get(key)
            text = "missing" if other_value is None else few(other_value)
            texts = few(a.values[key]), text
            yield Difference(index + 1, key[0], a.names[key], size, own_size, *texts)

    def _add_checksums(self, one: Observed, other: Observed) -> None:
        for name, observed in (("one device", one), ("strategy", other)):
            own = [checksum(v) for (k, _), v in observed.values.items() if k in _KEPT]
            self.checksums[f"variables, {name}"] = f"{checksum(np.array(own)):08x}"


#: Kinds of variables that are equal on all replicas.
_KEPT = ("variable", "slot")
#: Batches that are read to compare the order of rows.
_MOST_BATCHES = 256
#: More noise than this may be random numbers.
_LARGE_NOISE = 1e-3
#: Noise as large as a value, or as the update of a variable, varies much itself.
_CHAOS, _SAMPLES = 1.0, 4


def _difference(kind: str, name: str, alone: str, found: str) -> Difference:
    return Difference(0, kind, name, float("inf"), None, alone, found)
