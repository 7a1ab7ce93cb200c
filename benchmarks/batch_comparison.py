"""The comparison of a batch on all workers: through the lead, and by Gloo.

Input other than arrays is compared in each step: its shapes, or the rows and their
order. Ours sends them to the lead, which answers with all that differ
(`WorkerGroup.gather_values`). Here each comparison is awaited at once; a step computes
meanwhile. The peer is an all-reduce of four integers over Gloo, as in Torch's `Join`,
which says only whether workers agree.

Workers are processes that do nothing else, on the cores of one machine: with many of
them the time is mostly that in which they wait for a core. The processor time of a
worker's process, in all of its threads, is what a step of training has to share with
the comparison; the lead is a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from measuring import Results, options_parser, ratio
from page import write_page
from tables import markdown_table

WORKERS = ("2", "4", "8", "32", "64")
KINDS = ("ours", "Gloo")
#: Comparisons that are timed at once, and before them.
COUNT, WARM = 200, 10


def ours(addresses: list[str], rank: int) -> Callable[[], Any]:
    from keras_strategies.cluster.group import WorkerGroup

    group = WorkerGroup.join(addresses, rank, {}, timeout=120)
    # Rows, a checksum of their order, and what has changed by reading them.
    return lambda: group.gather_values("a batch", [64, 123456789, ""])


def gloo(addresses: list[str], rank: int) -> Callable[[], Any]:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    facts = torch.ones(4, dtype=torch.int64)
    return lambda: torch.distributed.all_reduce(facts, torch.distributed.ReduceOp.MAX)


def cpu_of(processes: list[psutil.Process]) -> float:
    """Seconds of the processor."""
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def work(kind: str, addresses: list[str], rank: int, rounds: int, answers: Any) -> None:
    """One worker; the first puts milliseconds of each round: its, its processor's,
    and those of the processor of the lead, if it has started one.

    Its processes end without what they would do at their exit, such as to take leave.
    """
    compare = {"ours": ours, "Gloo": gloo}[kind](addresses, rank)
    times: dict[str, list[float]] = {"wall": [], "cpu": [], "lead": []}
    for _ in range(WARM):
        compare()
    leads = psutil.Process().children()
    for _ in range(rounds):
        began, cpu, before = time.perf_counter(), time.process_time(), cpu_of(leads)
        for _ in range(COUNT):
            compare()
        times["wall"].append((time.perf_counter() - began) / COUNT * 1000)
        times["cpu"].append((time.process_time() - cpu) / COUNT * 1000)
        times["lead"].append((cpu_of(leads) - before) / COUNT * 1000)
    if rank == 0:
        answers.send(times)
    answers.close()
    # The last comparison may not have reached all.
    time.sleep(2)
    os._exit(0)


def numbers(kind: str, workers: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a comparison, and of processors, by round."""
    import torch  # noqa: F401 - once, for all processes

    import keras_strategies.cluster.group  # noqa: F401
    from keras_strategies.cluster.resolvers.local_processes import free_addresses

    addresses = free_addresses(workers)
    fork = multiprocessing.get_context("fork")
    found, answers = fork.Pipe(duplex=False)
    processes = [
        fork.Process(target=work, args=(kind, addresses, rank, rounds, answers))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        if not found.poll(300):
            raise RuntimeError(f"{workers} workers of {kind} did not answer.")
        times: dict[str, list[float]] = found.recv()
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return {name: [round(each, 4) for each in all_] for name, all_ in times.items()}


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["workers", "ours", "Gloo", "Gloo / ours"]
    header += ["processor of a worker: ours, Gloo", "processor of the lead"]
    rows = []
    for workers, found in results.items():
        own, peer = (found[kind] for kind in KINDS)
        cells = [f"{statistics.median(each['wall']):.2f} ms" for each in (own, peer)]
        cells.append(ratio(peer["wall"], own["wall"]))
        cpu = [f"{statistics.median(each['cpu']):.2f}" for each in (own, peer)]
        cells += [f"{', '.join(cpu)} ms", f"{statistics.median(own['lead']):.2f} ms"]
        rows.append([workers, *cells])
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(__doc__).parse_args()
    os.environ.setdefault("KERAS_BACKEND", "torch")
    known = Results(options.output / "batch_comparison.json")
    for workers in WORKERS:
        print(f"{workers} workers ...", file=sys.stderr, flush=True)
        by_kind = {kind: numbers(kind, int(workers), options.rounds) for kind in KINDS}
        known.put(workers, by_kind)
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
