"""Charts of speeds: a panel for each backend, a group of bars for each model."""

from __future__ import annotations

from pathlib import Path

#: Speeds by backend, model and contestant.
Speeds = dict[str, dict[str, dict[str, float]]]


def speed_chart(speeds: Speeds, unit: str, path: Path) -> None:
    """Writes a chart.

    Args:
        speeds: dict of backends, each of its models, each of its contestants' speeds.
        unit: str, what a speed of 1 is.
        path: the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(speeds),
        figsize=(4.6 * len(speeds), 4.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (backend, models) in zip(axes[0], speeds.items(), strict=True):
        names = list(dict.fromkeys(name for each in models.values() for name in each))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            shift = (i - (len(names) - 1) / 2) * width
            axis.bar(
                [j + shift for j in range(len(models))],
                [each.get(name, float("nan")) for each in models.values()],
                width,
                label=name,
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(
            range(len(models)), list(models), rotation=35, ha="right", fontsize=8
        )
        axis.set_title(backend)
        axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2)
    # When all bars are there: panels share the axis, and this ends its scaling.
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel(f"speed, {unit} = 1", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
