"""`ks.launch` by forks of this process, which has imported the framework."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from typing import Any


def launch(function: Any, workers: int, args: Any, **options: Any) -> list[Any]:
    """As `ks.launch`; devices are those that the function asks for."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(workers):
        own, other = context.Pipe(duplex=False)
        given = (function, args, rank, workers, other)
        processes.append(context.Process(target=_call, args=given, daemon=True))
        processes[-1].start()
        other.close()
        pipes.append(own)
    try:
        found = [own.recv() for own in pipes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _call(function: Any, args: Any, rank: int, workers: int, pipe: Any) -> None:
    task = {"type": "worker", "index": rank}
    cluster = {"worker": [f"127.0.0.1:{i + 1}" for i in range(workers)]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        pipe.send(function(*args))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(error)
    pipe.close()
    os._exit(0)  # What the parent has imported need not end here.
