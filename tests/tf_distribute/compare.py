"""Runs all cases under `tf.distribute` and under this package, and prints differences.

    python tests/tf_distribute/compare.py            # the backend of KERAS_BACKEND
    python tests/tf_distribute/compare.py --record   # records tf.distribute

Each side is a process. Values of `tf.distribute` are recorded in `tensorflow.json`,
with which `test_cases.py` compares this package on each backend.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RECORD = HERE / "tensorflow.json"
KINDS = ("one", "two")


def outcomes_of(name: str, pattern: str = "") -> dict[str, Any]:
    """The outcomes of the cases with a pattern in their names, in this process.

    Args:
        name: "tensorflow" for `tf.distribute`, "ours" for this package.
        pattern: str, part of the names.
    """
    from tf_distribute import sides
    from tf_distribute.cases import CASES, outcome

    make = getattr(sides, name)
    return {
        f"{kind}, {case}": outcome(run, side)
        for kind in KINDS
        for side in [make(kind)]
        for case, run in CASES.items()
        if pattern in f"{kind}, {case}"
    }


def are_equal(one: Any, other: Any) -> bool:
    """Whether two outcomes are equal values, or both errors."""
    if "error" in one or "error" in other:
        return "error" in one and "error" in other
    return _same(one["value"], other["value"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if any(isinstance(each, (dict, list, type(None))) for each in (one, other)):
        return one is other
    return bool(np.isclose(float(one), float(other), rtol=1e-6))


def differences(found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Cases with another outcome than under `tf.distribute`: theirs, and ours."""
    theirs = json.loads(RECORD.read_text())
    return {
        name: (theirs[name], own)
        for name, own in found.items()
        if not are_equal(theirs[name], own)
    }


def text(outcome: Any) -> str:
    """An outcome in a line."""
    return outcome["error"] if "error" in outcome else json.dumps(outcome["value"])


def _in_a_process(side: str, pattern: str) -> dict[str, Any]:
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, "--side", side, "--pattern", pattern]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=1800
    )
    return json.loads(done.stdout.splitlines()[-1])


def _serve(side: str, pattern: str) -> None:
    if side == "tensorflow":
        import tensorflow as tf

        [cpu] = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
    else:
        import keras_strategies as ks

        ks.set_virtual_cpu_devices(2)
    print(json.dumps(outcomes_of(side, pattern)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--side", choices=["tensorflow", "ours"])
    parser.add_argument("--pattern", default="", help="part of the names of cases")
    options = parser.parse_args()
    if options.side:
        _serve(options.side, options.pattern)
        return
    if options.record:
        theirs = _in_a_process("tensorflow", "")
        lines = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in theirs.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    found = _in_a_process("ours", options.pattern)
    different = differences(found)
    for name, (theirs, own) in different.items():
        print(f"{name}\n  tf.distribute: {text(theirs)}\n  here: {text(own)}")
    print(f"{len(different)} of {len(found)} cases differ.")


if __name__ == "__main__":
    main()
