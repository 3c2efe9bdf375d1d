"""Draws the loss of the run that was killed beside its control, and how far the run was at each moment."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from compare import merged, rows
from lives import Job
from matplotlib import pyplot as plt


def draw(control: Job, main: Job, killed: dict[int | None, str], path: Path) -> None:
    """``killed``: how the life with that number of evidence file ended. Writes a PNG to ``path``."""
    lives = [life for life in rows(main, 0) if life]
    expected = merged(rows(control, 0))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.4), height_ratios=(3, 2), layout="constrained")
    top.plot(
        [row.step for row in expected], [row.loss for row in expected],
        color="0.8", linewidth=5, label="control, never killed", solid_capstyle="round",
    )  # fmt: skip
    start = lives[0][0].at
    for number, life in enumerate(lives):
        colour = f"C{number % 10}"
        top.plot([row.step for row in life], [row.loss for row in life], color=colour, linewidth=1,
                 label=f"life {life[0].life + 1}")  # fmt: skip
        bottom.plot([row.at - start for row in life], [row.step for row in life], color=colour, linewidth=2)
        if number < len(lives) - 1:
            end = life[-1]
            top.axvline(end.step, color=colour, linestyle=":", linewidth=1)
            bottom.plot(end.at - start, end.step, marker="x", color="black", markersize=7)
            bottom.annotate(
                f"killed {killed.get(life[0].life, '')}", (end.at - start, end.step),
                textcoords="offset points", xytext=(-6, 6), fontsize=8, ha="right" if number else "left",
            )  # fmt: skip
    top.set(xlabel="optimizer step", ylabel="training loss (nats per byte)")
    top.legend(fontsize=8, ncols=2)
    bottom.set(xlabel="seconds since the first step", ylabel="optimizer step")
    figure.savefig(path, dpi=110)
    plt.close(figure)
