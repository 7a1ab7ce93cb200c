"""One process of `ks.launch`."""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path

from keras_strategies.cli.function import cloudpickle
from keras_strategies.cluster import TFConfigClusterResolver
from keras_strategies.errors import WorkerError


def work(folder: Path) -> int:
    """Calls the function and leaves what came of it in a file."""
    dumps = cloudpickle().dumps
    me = TFConfigClusterResolver()
    code = 0
    try:
        function, args, kwargs = pickle.loads((folder / "call").read_bytes())
        outcome = dumps(("result", function(*args, **kwargs)))
    except Exception as error:
        code = 1
        text = traceback.format_exc()
        try:
            outcome = dumps(("error", error, text))
            pickle.loads(outcome)
        except Exception:  # An exception that cannot travel.
            lost = WorkerError(f"{type(error).__name__}: {error}")
            outcome = dumps(("error", lost, text))
    unfinished = folder / f"{me.task_type} {me.task_id}.unfinished"
    unfinished.write_bytes(outcome)
    unfinished.rename(folder / f"{me.task_type} {me.task_id}")
    return code


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
