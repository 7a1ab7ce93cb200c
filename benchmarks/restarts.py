"""Restarts of all workers from a checkpoint, beside the losses of `elasticity.py`.

    python benchmarks/restarts.py --restarts 3

The training of `elasticity.py`, on Torch, with a checkpoint of each epoch: under
`keras-strategies launch --max-restarts` with `BackupAndRestore`, and under
`torch.distributed.run` with the same model by hand. The time of a kill is that until
the end of the next step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elastic_training import (
    PACE,
    ROWS,
    WORKERS,
    batch_size,
    data,
    fit,
    make_model,
    step_log,
    steps_of,
    wait_for,
)
from elasticity import table
from measuring import RESULTS, Results
from page import write_page

#: Torch 2.13: `--standalone` would give restarted workers the addresses of lost ones.
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def train(folder: Path) -> None:
    """One worker under `keras-strategies launch`."""
    import keras

    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy(
        communication_options=ks.CommunicationOptions(timeout_seconds=60)
    )
    with strategy.scope():
        model = make_model()
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    fit(model, 10**6, [step_log(folder, strategy), backup])


def train_by_hand(folder: Path) -> None:
    """One worker of `torch.distributed.run`: DDP, and a checkpoint of each epoch."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, y = map(torch.from_numpy, data())
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.Tanh(),
        torch.nn.BatchNorm1d(6),
        torch.nn.Linear(6, 1),
    )
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    path, epoch = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    loss_of = torch.nn.BCEWithLogitsLoss()
    with (folder / f"{os.getpid()}.steps").open("a") as log:
        while True:
            for rows in torch.arange(ROWS).split(batch_size("torch")):
                time.sleep(PACE)
                own = rows[rank::WORKERS]
                optimizer.zero_grad()
                loss_of(parallel(x[own]), y[own]).backward()
                optimizer.step()
                log.write(f"{time.monotonic()} 0 {WORKERS}\n")
                log.flush()
            epoch += 1
            if rank == 0:
                state = {"model": model.state_dict(), "epoch": epoch}
                torch.save({**state, "optimizer": optimizer.state_dict()}, f"{path}.p")
                os.replace(f"{path}.p", path)


def restarts(name: str, command: list[str], kills: int, seed: int) -> list[float]:
    """Seconds from kills of a worker to the next step after the restart."""
    rng = random.Random(seed)
    found: list[float] = []
    with tempfile.TemporaryDirectory() as path:
        folder, output = Path(path), Path(path, "output")
        with (
            output.open("w") as file,
            subprocess.Popen(
                [*command, path],
                env={**os.environ, **NEW_STORES, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
            ) as process,
        ):
            try:
                for _ in range(kills):
                    found.append(_restart(name, folder, rng))
                    print(f"{name}: {found[-1]:.2f} s", file=sys.stderr, flush=True)
            except SystemExit:
                print(output.read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                process.terminate()
    return found


def _restart(name: str, folder: Path, rng: random.Random) -> float:
    """Kills a worker; seconds until the next step."""
    known: set[Path] = set()

    def training() -> list[Path]:
        """The logs of new workers, when all of them train."""
        logs = [path for path in folder.glob("*.steps") if path not in known]
        return logs if sum(bool(steps_of(path)) for path in logs) == WORKERS else []

    workers = wait_for(training, f"the workers of {name} train")
    time.sleep(rng.uniform(1, 3))
    known |= set(folder.glob("*.steps"))
    begin = time.monotonic()
    os.kill(int(rng.choice(sorted(workers)).stem), signal.SIGKILL)
    again = wait_for(training, f"{name} trains again")
    for path in known:
        path.unlink()
    return min(steps_of(path)[0][0] for path in again) - begin


def restart_commands(kills: int) -> dict[str, list[str]]:
    """What starts workers again from a checkpoint."""
    launch = ["-m", "keras_strategies", "launch", "--grace-seconds", "1", "--workers"]
    launch += [str(WORKERS), "--max-restarts", str(kills), __file__]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    torchrun += [str(WORKERS), "--max-restarts", str(kills), "--monitor-interval=0.1"]
    python = sys.executable
    return {
        "keras-strategies launch --max-restarts": [*(python, *launch, "--train")],
        "torch.distributed.run": [python, *torchrun, __file__, "--by-hand"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=3, help="kills of each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    for name in ("--train", "--by-hand"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
    elif options.by_hand:
        train_by_hand(options.by_hand)
    else:
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    known = Results(options.output / "elasticity.json")
    found: dict[str, list[float]] = {}
    for name, command in restart_commands(options.restarts).items():
        found[name] = restarts(name, command, options.restarts, options.seed)
        # What is known is not lost if the other does not end in time.
        known.put("restarts", {**known.values.get("restarts", {}), **found})
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
