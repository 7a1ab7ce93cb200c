"""Plants one mistake at a time, and shows which tests find it.

Each mutant below is a plausible mistake in a place that decides whether numbers are
right, or whether a failure is reported. The suite is as good as its ability to fail on
them: a mutant that no test finds is a missing test. For each mutant the tests are
named that are expected to find it, each of them part of `make test`.

    python tests/mutants.py                    # all mutants
    python tests/mutants.py gradient_mean last # those with a word in their names
    python tests/mutants.py --list

The working tree is not touched: a mutant is planted in a copy. A line for each mutant
and backend names the test that found it. `found` means that a test failed; `alive`,
that all passed; `clean?`, that the tests fail without the mutant. The exit code is 1
unless every mutant is found.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("keras_strategies", "tests", "examples", "pyproject.toml")
SECONDS = 600

Tests = dict[str, str]


def _everywhere(tests: str) -> Tests:
    return dict.fromkeys(("jax", "torch", "tensorflow"), tests)


@dataclass(frozen=True)
class Mutant:
    """A mistake, and what finds it.

    Args:
        name: what the table calls it.
        file: path below `keras_strategies`.
        before: the code that is replaced; it occurs exactly once.
        after: the mistake.
        tests: by backend, arguments of pytest: the cheapest tests that find it.
    """

    name: str
    file: str
    before: str
    after: str
    tests: Tests

    def plant(self, root: Path) -> None:
        path = root / "keras_strategies" / self.file
        source = path.read_text()
        if source.count(self.before) != 1:
            raise SystemExit(
                f"Mutant {self.name!r} replaces code of {self.file} that occurs "
                f"{source.count(self.before)} times, and should occur once. Change "
                f"the mutant with the code:\n{self.before}"
            )
        path.write_text(source.replace(self.before, self.after))


EXACTNESS = "tests/exactness/test_exactness.py::test_same_as_one_device"
RUN = "tests/custom_loops/test_run.py"
TRAINING = "tests/custom_loops/test_training.py"

MUTANTS = [
    # Gradients and what happens to them.
    Mutant(
        "gradient_mean_torch",
        "engines/torch/tensor_primitives.py",
        "            total = total + tensor\n        return total\n",
        "            total = total + tensor\n        return total / len(tensors)\n",
        {"torch": f"{EXACTNESS}[size_3-mirrored_2]"},
    ),
    Mutant(
        "gradient_mean_tensorflow",
        "engines/tensorflow/tensor_primitives.py",
        "        return tf.add_n([tf.convert_to_tensor(tensor) for",
        "        return 0.5 * tf.add_n([tf.convert_to_tensor(tensor) for",
        {"tensorflow": f"{EXACTNESS}[size_3-mirrored_2]"},
    ),
    Mutant(
        "gradient_mean_jax",
        "engines/jax/run/traced_reductions.py",
        "    ReduceOp.SUM: lax.psum,",
        "    ReduceOp.SUM: lax.pmean,",
        {"jax": "tests/custom_loops/test_training.py -k portable_loop"},
    ),
    Mutant(
        "wrong_rows_of_gradients_over_workers",
        "runtime/replicas/replica_set.py",
        "return tensor[start : start + rows[index] * multiple]",
        "return tensor[: rows[index]]",
        {"torch": "tests/multi_worker/test_exactness.py -k size_3"},
    ),
    Mutant(
        "central_update_with_half_the_gradient",
        "engines/jax/fit/partitioned_step.py",
        "        return jax.jit(update)(*args, **kwargs)",
        "        optimizer_variables, grads, trainable = args\n"
        "        halves = [g / 2 for g in grads]\n"
        "        return jax.jit(update)(optimizer_variables, halves, trainable)",
        {
            "jax": f"{EXACTNESS}[global_clipnorm_accumulation_ema-central] "
            f"{EXACTNESS}[on_batch-central]"
        },
    ),
    Mutant(
        "copies_keep_old_values",
        "engines/tensorflow/replicas/mirrored_variables.py",
        "done.append(raw.AssignVariableOp(resource=copy.handle, value=value))",
        "done.append(copy.read_value())",
        {"tensorflow": f"{EXACTNESS}[size_3-mirrored_2]"},
    ),
    Mutant(
        "copied_gradient_of_the_first_replica",
        "engines/tensorflow/data_parallel/graph_copies.py",
        "            copy.set(parts[template], parts[replica_id])",
        "            copy.set(parts[template], parts[template])",
        {"tensorflow": f"{EXACTNESS}[size_3-mirrored_2]"},
    ),
    Mutant(
        "statistics_of_copies_not_received",
        "engines/tensorflow/data_parallel/graph_copies.py",
        "                    copy.set(before, after)\n        return results",
        "                    pass\n        return results",
        {
            "tensorflow": "tests/backends/tensorflow/test_tensorflow_copies.py"
            " -k copies_exchange_statistics"
        },
    ),
    Mutant(
        "gradient_of_batch_statistics_local",
        "training/batch_norm.py",
        "replica.all_reduce(ReduceOp.SUM, ops.stack([of_mean, of_variance]))",
        "ops.stack([of_mean, of_variance])",
        {
            "tensorflow": "tests/backends/tensorflow/test_tensorflow_copies.py"
            " -k copies_exchange_statistics"
        },
    ),
    Mutant(
        "python_state_not_compared",
        "rows/row_prover.py",
        "            if change is not None:",
        "            if change is not None and rows < 0:",
        {"torch": "tests/row_proofs/test_unsplit_layers.py -k python_runs_as_often"},
    ),
    Mutant(
        "clipped_before_the_sum",
        "training/model_hooks.py",
        "        run.apply_gradients(",
        "        grads = optimizer._clip_gradients(list(grads))\n"
        "        run.apply_gradients(",
        _everywhere("tests/custom_loops/test_optimizers.py -k before_they_are_clipped"),
    ),
    # Rows, weights, losses.
    Mutant(
        "loss_over_local_rows",
        "training/losses.py",
        '            total = replica.all_reduce("SUM", total)\n',
        "            pass\n",
        _everywhere(f"{TRAINING} -k portable_loop"),
    ),
    Mutant(
        "regularization_on_each_replica",
        "training/losses.py",
        "convert_to_tensor(loss)) for loss in losses) / count",
        "convert_to_tensor(loss)) for loss in losses)",
        _everywhere(f"{RUN} -k scale_regularization_loss"),
    ),
    Mutant(
        "last_rows_dropped",
        "runtime/row_splits.py",
        "    return [base + 1] * larger + [base] * (parts - larger)",
        "    return [base] * parts",
        {
            "jax": "tests/input/test_workers.py",
            "torch": f"{EXACTNESS}[sizes-mirrored_2]",
        },
    ),
    Mutant(
        "replicas_weigh_the_same",
        "runtime/data_parallel/split_plan.py",
        '        return [keras.ops.cast(size, "float64") / count for size in sizes]',
        "        return [1.0 / len(sizes) for size in sizes]",
        {"tensorflow": f"{EXACTNESS}[penalties-mirrored_2]"},
    ),
    Mutant(
        "last_batches_of_other_workers_dropped",
        "input/joined_batches.py",
        "            if not present:\n                return",
        "            if len(present) < len(found):\n                return",
        {"torch": "tests/multi_worker/test_input.py -k different_amounts"},
    ),
    # State of layers and metrics.
    Mutant(
        "batch_norm_local",
        "training/model_hooks.py",
        "            or not replica.synchronizes_batch_norm\n",
        "            or True\n",
        {
            "torch": f"{EXACTNESS}[sizes-mirrored_4]",
            # In `fit` BatchNormalization is known by its type.
            "tensorflow": "tests/backends/tensorflow/test_tensorflow_layers.py"
            " -k batch_normalization_is_split",
        },
    ),
    Mutant(
        "metric_by_mean",
        "runtime/state/run_state.py",
        "keras.ops.cast(sum(terms[1:], start=terms[0]), variable.dtype)",
        "keras.ops.cast(sum(terms[1:], start=terms[0]) / len(terms), variable.dtype)",
        _everywhere(f"{RUN} -k on_read_variables_are_brought_together"),
    ),
    Mutant(
        "masks_are_counted_by_each_replica",
        "runtime/data_parallel/row_functions.py",
        "    total, valid = _sums_of_all_rows(keras.ops.ones_like(valid), valid)",
        "    total, valid = map(keras.ops.sum, (keras.ops.ones_like(valid), valid))",
        {"torch": "tests/row_parts/test_functions.py -k masked_losses"},
    ),
    Mutant(
        "random_numbers_of_the_first_rows",
        "runtime/random_numbers/row_draws.py",
        "        before: Any = sum(every[:replica])",
        "        before: Any = 0 * sum(every[:replica])",
        _everywhere("tests/random_numbers/test_run.py -k 'normal and sizes1'"),
    ),
    Mutant(
        "random_numbers_without_rows",
        "runtime/random_numbers/row_draws.py",
        "        return self._rows.times(multiple) if multiple else None",
        "        return None",
        {"torch": "tests/random_numbers/test_rows.py -k Dropout-3"},
    ),
    Mutant(
        "random_numbers_of_other_lengths_have_rows",
        "runtime/random_numbers/row_draws.py",
        "        return rows if rows is not None and length == rows.own else None",
        "        return rows if rows is not None and length else None",
        {"torch": "tests/random_numbers/test_run.py -k 'other_lengths and fixed'"},
    ),
    # Parameter servers.
    Mutant(
        "update_applied_twice",
        "parameter_server/server/variable_store.py",
        "        return task >= self.done and self.steps.get(task, -1) < number",
        "        return task >= self.done",
        {"torch": "tests/parameter_server/test_store.py -k counts_once"},
    ),
    Mutant(
        "worker_does_not_clip",
        "parameter_server/worker/gradient_transforms.py",
        "    if clips and not optimizer.gradient_accumulation_steps:",
        "    if False:",
        {"torch": "tests/parameter_server/test_fit.py -k momentum"},
    ),
    Mutant(
        "snapshot_without_its_journal",
        "parameter_server/server/snapshots.py",
        "for later in range(generation, self._generation + 1)",
        "for later in range(0)",
        {"torch": "tests/parameter_server/test_store.py -k began_after_a_snapshot"},
    ),
    # Failures.
    Mutant(
        "late_worker_not_named",
        "lead/generations.py",
        "{settings.named(missing)} did not connect",
        "some worker did not connect",
        {"torch": "tests/cluster/test_group.py -k never_comes"},
    ),
    Mutant(
        "lost_worker_not_noticed",
        "lead/state.py",
        "silent <= self.settings.timeout",
        "silent <= 1000 * self.settings.timeout",
        {"torch": "tests/cluster/test_group.py -k lost_process"},
    ),
    # Values that replicas exchange.
    Mutant(
        "mean_of_means",
        "collectives/reduce_gather.py",
        "    return total / strategy.num_replicas_in_sync if mean else total",
        "    return total / workers.group.count if mean else total",
        {"torch": "tests/multi_worker/test_custom_loops.py -k reduce"},
    ),
]


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)


def failed_test(root: Path, backend: str, arguments: str) -> str | None:
    """The first test that fails; None if all pass."""
    selected, _, expression = arguments.partition(" -k ")
    options = ["-k", expression] if expression else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not gpu and not nightly", *selected.split(), *options],
        cwd=root,
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(" ", 1)[1]
    raise SystemExit(
        f"pytest ended with exit code {done.returncode} and named no failed test "
        f"({backend}, {arguments}):\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )


@functools.cache
def fails_without_a_mutant(backend: str, arguments: str) -> str | None:
    """The first test that fails in the tree as it is."""
    return failed_test(ROOT, backend, arguments)


class Outcome(NamedTuple):
    """What came of a mutant on one backend.

    Args:
        mutant: its name.
        backend: the backend.
        kind: `found`, `alive` or `clean?`.
        test: the id of the test that failed; empty if all passed.
    """

    mutant: str
    backend: str
    kind: str
    test: str

    def __str__(self) -> str:
        return f"{self.mutant:40} {self.backend:11} {self.kind:7} {self.test}"


def examine(mutant: Mutant) -> Iterator[Outcome]:
    """What came of the mutant, for each backend."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_tree(root)
        mutant.plant(root)
        for backend, tests in mutant.tests.items():
            failed = fails_without_a_mutant(backend, tests)
            if failed is not None:
                yield Outcome(mutant.name, backend, "clean?", failed)
                continue
            failed = failed_test(root, backend, tests)
            kind = "alive" if failed is None else "found"
            yield Outcome(mutant.name, backend, kind, failed or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants with one in their name")
    parser.add_argument("--list", action="store_true", help="print their names")
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [m for m in MUTANTS if any(word in m.name for word in words)]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    outcomes = []
    for mutant in chosen:
        for outcome in examine(mutant):
            outcomes.append(outcome)
            print(outcome, flush=True)
    found = sum(outcome.kind == "found" for outcome in outcomes)
    print(f"\n{found} of {len(outcomes)} found")
    return int(found < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
