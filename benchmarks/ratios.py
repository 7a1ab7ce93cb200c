"""The first tables and the picture of docs/benchmarks.md: ratios, by what one asks.

    python benchmarks/ratios.py    # draw docs/img/ratios.png

Ratios are those of the stored results. `page.py` writes the tables. A cell that is
older than the newest of its table has a mark.
"""

from __future__ import annotations

from statistics import median

from measuring import BACKENDS, RESULTS, Results, picture_path
from tables import markdown_table

NAMES = {"jax": "JAX", "torch": "Torch", "tensorflow": "TensorFlow"}
PEERS = {"jax": "DataParallel", "torch": "DDP", "tensorflow": "tf.distribute"}
COLORS = {"jax": "#3b6fb6", "torch": "#e08a2c", "tensorflow": "#4a9d5b"}
OLDER = "°"

#: A number for each round.
Rounds = list[float]


def _of_rounds(one: Rounds, other: Rounds) -> list[float]:
    return [first / second for first, second in zip(one, other, strict=True)]


def fit_ratios(beside: dict[str, str]) -> dict[str, dict[str, Rounds]]:
    """Speeds of `mirrored` beside another, by model and backend.

    Args:
        beside: the other contestant, by backend.
    """
    found: dict[str, dict[str, Rounds]] = {}
    for name, rounds in _fits().values.items():
        backend, model = name.split(", ")
        other = rounds[beside[backend]]
        found.setdefault(model, {})[backend] = _of_rounds(other, rounds["mirrored"])
    return found


def _fits() -> Results:
    return Results(RESULTS / "fit.json")


def _fit_table(beside: dict[str, str], unit: str, header: list[str]) -> str:
    fits = _fits()
    dates = {name: each["date"] for name, each in fits.conditions_of().items()}
    rows = []
    for model, by_backend in fit_ratios(beside).items():
        cells = []
        for backend in BACKENDS:
            is_older = dates[f"{backend}, {model}"] < max(dates.values())
            middle = median(by_backend[backend])
            cells.append(f"{middle:.2f}{unit}{OLDER if is_older else ''}")
        rows.append([model, *cells])
    return markdown_table(header, rows)


def devices_table() -> str:
    """Speed-up by two devices, each with a core, over plain Keras on one core."""
    header = ["`fit` of", *(NAMES[backend] for backend in BACKENDS)]
    return _fit_table(dict.fromkeys(BACKENDS, "plain"), "x", header)


def peers_table() -> str:
    """Our speed as a multiple of what one would use instead."""
    header = ["`fit` of", *(f"{NAMES[b]}, {PEERS[b]}" for b in BACKENDS)]
    return _fit_table(PEERS, "", header)


def memory_table() -> str:
    """Our memory as a multiple of others', the range over models."""
    from memory import contestants

    shown = {
        "one process": "two devices",
        "two workers": "two workers",
        "parameter servers": "parameter servers",
    }
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, rounds in Results(RESULTS / "memory.json").values.items():
        part, backend, _ = name.split(", ")
        *others, ours, peer = contestants(part, backend)
        for other in (*others, peer):
            beside = "plain Keras" if other in others else "the peer"
            ratios = _of_rounds(rounds[ours]["all"], rounds[other]["all"])
            cells = found.setdefault((shown[part], beside), {})
            cells.setdefault(backend, []).append(median(ratios))
    rows = [
        [f"{what}, beside {other}", *(_range(cells.get(b, [])) for b in BACKENDS)]
        for (what, other), cells in found.items()
    ]
    header = ["memory of all processes", *(NAMES[backend] for backend in BACKENDS)]
    return markdown_table(header, rows)


def _range(values: list[float]) -> str:
    if not values:
        return "not measured"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def losses_table() -> str:
    """Seconds without a step when a worker is killed, median and worst."""
    found = Results(RESULTS / "elasticity.json").values
    rows = []
    for backend in BACKENDS:
        seconds = found[backend]["seconds"]["kill"]
        rows.append([f"elastic, {NAMES[backend]}", *_seconds(seconds)])
    for name, seconds in found["restarts"].items():
        rows.append([f"restart by `{name}`", *_seconds(seconds)])
    return markdown_table(["a worker is killed", "median", "worst"], rows)


def _seconds(seconds: list[float]) -> list[str]:
    return [f"{median(seconds):.2f} s", f"{max(seconds):.2f} s"]


TABLES = {
    "devices": devices_table,
    "peers": peers_table,
    "memory": memory_table,
    "losses": losses_table,
}


def draw() -> None:
    """Draws the speed of `fit` beside peers: medians, and ranges of rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = fit_ratios(PEERS)
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for i, by_backend in enumerate(found.values()):
        for j, backend in enumerate(BACKENDS):
            ratios, y = by_backend[backend], i + (j - 1) * 0.22
            color = COLORS[backend]
            axis.plot([min(ratios), max(ratios)], [y, y], color=color, linewidth=2.5)
            label = f"{NAMES[backend]} beside {PEERS[backend]}" if i == 0 else None
            axis.plot(median(ratios), y, "o", color=color, markersize=7, label=label)
    axis.axvline(1, color="0.5", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks([0.5, 0.75, 1, 1.5, 2, 3], ["0.5", "0.75", "1", "1.5", "2", "3"])
    axis.minorticks_off()
    axis.set_yticks(range(len(found)), list(found))
    axis.invert_yaxis()
    axis.set_xlabel("speed as a multiple of the peer's: to the right, ours is faster")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    figure.savefig(picture_path(RESULTS, "ratios.png"), dpi=150)


if __name__ == "__main__":
    draw()
