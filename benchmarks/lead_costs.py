"""The lead of 8 to 1,000 simulated workers beside Torch's `TCPStore`.

    python benchmarks/lead_costs.py

Workers are connections of one process without threads, so times are those of the lead,
or of the store's server, and of this process together; CPU is that of the lead or of
the server alone. A *comparison* compares a value of all workers, and each hears the
result. In the store, each worker adds to a counter, the last one sets a key, and each
reads it. Workers *beat* as often as the lead has told them. A *generation* ends by the
loss of a worker and begins with the others. Numbers are medians over rounds.

    python benchmarks/lead_costs.py --soak FILE

adds the soak's events (`tests/elastic/test_soak.py`), lines of `BACKEND COUNTS` as the
test prints them.
"""

from __future__ import annotations

import ast
import collections
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import Results, options_parser
from page import write_page
from tables import markdown_table

WORKERS = (8, 64, 256, 1000)
# That of workers without options.
TIMEOUT = 300.0
_BEATS_SECONDS = 5.0
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def cpu(pid: int) -> float:
    """Milliseconds of CPU of a process, of all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e6


def cost(pid: int, call: Callable[[], None], rounds: int) -> list[float]:
    """Milliseconds of a call, and of CPU of a process in it: medians."""
    found = []
    for _ in range(rounds):
        begun, before = time.perf_counter(), cpu(pid)
        call()
        found.append((1000 * (time.perf_counter() - begun), cpu(pid) - before))
    return [round(statistics.median(each), 2) for each in zip(*found, strict=True)]


def of_beats(workers: Any, pid: int, seconds: float) -> float:
    """Milliseconds of CPU of a lead in 250 ms, in which its workers beat."""
    from lead.simulated_workers import send_beat

    begun, before = time.perf_counter(), cpu(pid)
    count, sent = len(workers.connected), 0
    while (passed := time.perf_counter() - begun) < _BEATS_SECONDS:
        while sent < passed * count / seconds:
            send_beat(workers, sent % count)
            sent += 1
        time.sleep(seconds / count)
    workers.until("beat", sent)
    return round((cpu(pid) - before) * 0.25 / passed, 2)


def of_lead(count: int, rounds: int) -> dict[str, Any]:
    from lead.leads import RunningLead
    from lead.simulated_workers import SimulatedWorkers, ask_for_status, compare

    begun = time.perf_counter()
    with RunningLead(count, timeout=TIMEOUT, patience=60.0) as lead:
        pid = lead.process.pid
        socket.create_connection(lead.address).recv(1)
        found: dict[str, Any] = {"start": round(time.perf_counter() - begun, 3)}
        begun = time.perf_counter()
        workers = SimulatedWorkers(lead, count)
        workers.until("go", count)
        found["form"] = round(time.perf_counter() - begun, 3)
        found["threads"], found["megabytes"] = lead.threads, round(lead.megabytes)
        found["beats"] = of_beats(workers, pid, workers.beat_seconds)
        found["comparison"] = cost(pid, lambda: compare(workers, count), rounds)
        found["status"] = cost(pid, lambda: ask_for_status(workers), rounds)
        left = iter(range(count - 1, 0, -1))

        def lose() -> None:
            index = next(left)
            workers.leave(index)
            workers.until("go", index)

        found["generation"] = cost(pid, lose, min(5, count - 1))
        workers.close()
    return found


def of_store(count: int, rounds: int) -> dict[str, Any]:
    from torch.distributed import TCPStore

    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        assert server.stdout is not None and server.stdin is not None
        port = int(server.stdout.readline())
        begun = time.perf_counter()

        def connect(_: int) -> Any:
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

        with ThreadPoolExecutor(64) as pool:
            stores = list(pool.map(connect, range(count)))
        form = round(time.perf_counter() - begun, 3)
        numbers = iter(range(rounds))

        def compare() -> None:
            number = next(numbers)
            for store in stores:
                if store.add(f"count{number}", 1) == count:
                    store.set(f"all{number}", "x")
            for store in stores:
                store.get(f"all{number}")

        found = {"form": form, "comparison": cost(server.pid, compare, rounds)}
        threads = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
        found["threads"] = threads
        server.stdin.close()
    return found


def table(results: dict[str, Any]) -> str:
    rows = []
    for name, each in results.items():
        if "store" not in each:
            continue
        lead, store = each["lead"], each["store"]
        ratio = lead["comparison"][1] / store["comparison"][1]
        rows.append(
            [
                name,
                f"{lead['start']:.2f} s",
                f"{lead['form']:.2f}, {store['form']:.2f} s",
                f"{lead['comparison'][1]:.1f}, {store['comparison'][1]:.1f} ms",
                f"{ratio:.1f}",
                f"{lead['beats']:.1f} ms",
                f"{lead['status'][1]:.1f} ms",
                f"{lead['generation'][0]:.0f} ms, {lead['generation'][1]:.0f} ms",
                f"{lead['threads']}, {lead['megabytes']} MB",
            ]
        )
    header = ["", "start", "connected: lead, store"]
    header += ["CPU of a comparison: lead, store", "ratio"]
    header += ["CPU of beats, in 250 ms", "CPU of the table of all"]
    header += ["a generation: time, CPU", "threads, memory"]
    return markdown_table(header, rows)


def soak_table(results: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys(kind for each in results.values() for kind in each))
    shown = [kind for kind in kinds if kind not in ("trainings", "difference")]
    rows = [
        [
            backend,
            str(sum(each.get(kind, 0) for kind in shown)),
            *[str(each.get(kind, 0)) for kind in shown],
            f"{each['difference']:.0e}",
        ]
        for backend, each in results.items()
    ]
    return markdown_table(["", "events", *shown, "weights within"], rows)


def read_soak(file: Path) -> dict[str, dict[str, Any]]:
    """The events of each backend, and the largest difference of a weight."""
    found: dict[str, Any] = {}
    for line in file.read_text().splitlines():
        match = re.search(r"^(\w+).*?({.*}), weights within (\S+)", line)
        if match is None:
            continue
        backend, counts, difference = match.groups()
        each = found.setdefault(backend, collections.Counter(difference=0.0))
        largest = max(each["difference"], float(difference))
        each.update(ast.literal_eval(counts))
        each.update(trainings=1)
        each["difference"] = largest
    return {backend: dict(each) for backend, each in found.items()}


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--soak", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    options = parser.parse_args()
    if options.soak is not None:
        results = Results(options.output / "soak.json")
        for backend, each in read_soak(options.soak).items():
            results.put(backend, each)
        write_page(options.output)
        return
    # Behind the benchmarks, of which some have names of folders there.
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = Results(options.output / "lead_costs.json")
    for count in options.workers:
        found = {
            "lead": of_lead(count, 4 * options.rounds),
            "store": of_store(count, 4 * options.rounds),
        }
        print(count, found)
        results.put(f"{count:,} workers", found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
