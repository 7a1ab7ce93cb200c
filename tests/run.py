"""Run the tests of all backends on all cores, and add up the results.

    python tests/run.py                     # every test of `make test`
    python tests/run.py tests/input ...     # only these files or folders
    python tests/run.py --lint              # style and types, too
    python tests/run.py --check             # the quickest test of each subject
    python tests/run.py --nightly           # the tests marked nightly, too
    python tests/run.py --record            # note how long each file takes

Keras reads KERAS_BACKEND once per process, so each backend has its own pytest. The
files of tests are grouped into jobs of at least 45 seconds, by the durations in
`durations.json`, and the longest job comes first, so that all cores have work to the
end. A job's process is forked from one that has imported its framework already. Files
of tests that do not depend on a backend run once.

KS_BACKENDS  backends to test, separated by commas (default: all three)
KS_JOBS      jobs that run at the same time (default: one for each core, at most two,
             and one more, because tests of several processes often wait)
KS_TIMEOUT   seconds after which a job is ended (default: 1500, nightly 7200)
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from runner.job_processes import TICK, Processes
from runner.jobs import Job, all_jobs
from runner.results import Result, print_log, result_of, summarize
from runner.settings import LOGS, Settings


async def work(jobs: list[Job], run: Callable, results: dict[Job, Result]) -> float:
    """Takes jobs from the front until none is left; returns when it ended."""
    while jobs:
        job = next_job(jobs, {done.name for done in results})
        if job is None:
            await asyncio.sleep(TICK)
            continue
        start = time.monotonic()
        problem = await run(job)
        result = result_of(job, problem, time.monotonic() - start)
        results[job] = result
        print(f"{job.name}: {result} in {result.seconds:.0f} s")
        if result.failed:
            print_log(job, result)
    return time.monotonic()


def next_job(jobs: list[Job], done: set[str]) -> Job | None:
    """Removes and returns the first job that need not wait."""
    for index, job in enumerate(jobs):
        if not job.after or job.after in done:
            return jobs.pop(index)
    return None


async def main() -> int:
    settings = Settings.from_command_line(__doc__)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    start = time.monotonic()
    jobs = all_jobs(settings)
    used = {job.backend for job in jobs if not job.is_command}
    results: dict[Job, Result] = {}
    sockets = tempfile.TemporaryDirectory(prefix="ks-fork-")
    processes = Processes(settings, Path(sockets.name))
    try:
        processes.start_servers(name for name in settings.backends if name in used)
        ends = await asyncio.gather(
            *(work(jobs, processes.run, results) for _ in range(settings.jobs))
        )
    finally:
        processes.close()
        sockets.cleanup()
    total = sum(results.values(), Result())
    summarize(results, settings, sum(max(ends) - end for end in ends))
    print(f"{time.monotonic() - start:.0f} s in all")
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(asyncio.run(main()))
