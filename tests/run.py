"""Run the tests of all backends on all cores, and add up the results.

    python tests/run.py                     # every test of `make test`
    python tests/run.py tests/input ...     # only these files or folders
    python tests/run.py --lint              # style and types, too
    python tests/run.py --check             # the quickest tests, those of check.txt
    python tests/run.py --nightly           # the tests marked nightly, too

Keras reads KERAS_BACKEND once per process, so each backend has its own pytest, forked
from a process that has imported its framework already. Marks in the files say which
tests run: see `harness/marks.py`.

KS_BACKENDS  backends to test, separated by commas (default: all three)
KS_JOBS      jobs that run at the same time (default: one for each core, at most two,
             and one more, because tests of several processes often wait)
KS_TIMEOUT   seconds after which a job is ended (default: 1500, nightly 7200)
KS_ROTATION  the day by which tests marked `one_backend` have their backend
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from harness.marks import BACKENDS, ROTATION
from runner.jobs import LOGS, ROOT, Job, Processes, test_jobs
from runner.results import Result, print_log, result_of, summarize


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*")
    for option in ("lint", "check", "nightly"):
        parser.add_argument(f"--{option}", action="store_true")
    given = parser.parse_args()
    for path in given.paths:
        if not (ROOT / path.partition("::")[0]).exists():
            parser.error(f"there is no {path!r} below {ROOT}")
    names = os.environ.get("KS_BACKENDS") or ",".join(BACKENDS)
    given.backends = [name.strip() for name in names.split(",")]
    if unknown := sorted(set(given.backends) - set(BACKENDS)):
        parser.error(f"KS_BACKENDS is {names!r}: {unknown} not among {BACKENDS}")
    if given.check:
        given.paths += (ROOT / "tests" / "check.txt").read_text().splitlines()
    return given


def main() -> int:
    given = arguments()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    start = time.monotonic()
    day = os.environ.pop(ROTATION, str(int(time.time() // 86400)))
    if not given.nightly:
        os.environ[ROTATION] = day
    jobs = [Job()] * given.lint + test_jobs(given.backends, given.paths)
    side_by_side = int(os.environ.get("KS_JOBS") or 1 + min(2, os.cpu_count() or 1))
    processes = Processes(given.nightly, side_by_side)

    def run(job: Job) -> Result:
        begin = time.monotonic()
        problem = processes.run(job)
        result = result_of(job, problem, time.monotonic() - begin)
        print(f"{job.name}: {result} in {result.seconds:.0f} s")
        if result.failed:
            print_log(job, result)
        return result

    try:
        pool = ThreadPoolExecutor(side_by_side)
        results = dict(zip(jobs, pool.map(run, jobs), strict=True))
    except KeyboardInterrupt:
        # The threads wait for ends of processes that nobody reports any more.
        processes.close()
        os._exit(130)
    processes.close()
    total = summarize(results)
    print(f"{time.monotonic() - start:.0f} s, {ROTATION}={day}\n{total}")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
