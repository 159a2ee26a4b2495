"""A plan as a picture: where the time of a step goes, alternatives, and every split."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from hetconv.schemas.plan import LayerPlan, Plan
from hetconv.sharding.split import SplitKind

from .plots import INK, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[SplitKind, str] = {
    "replicate": "#8c8c8c",
    "sample": "#2f9e6e",
    "filter": "#2b6cb0",
    "channel": "#8e5bb5",
    "depth": "#7a5c3e",
    "height": "#dd7a26",
    "width": "#c2477f",
}
BUSY, MOVING, IDLE = "#2b6cb0", "#dd7a26", "#e6e6e6"
ROW, COLUMN, MARGIN = (
    0.19,
    5.5,
    0.75,
)  # inches: of a row, of a column of layers, and of what is above or below an axis
NAME, ROWS = 36, 45  # the most letters of a layer's name, rows of a column


def draw(plan: Plan, path: Path) -> None:
    """Draws into a file, see `figure`."""
    columns = max(ceil(len(plan.layers) / ROWS), 1)
    rows = ceil(len(plan.layers) / columns)
    above = 0.3 * max(plan.world, len(plan.alternatives or {}), 2) + MARGIN
    below = ROW * rows + MARGIN
    with figure(path, max(COLUMN * columns, 11), above + below) as whole:
        top, bottom = whole.subfigures(
            2, 1, squeeze=False, height_ratios=(above, below), hspace=0.02
        )[:, 0]
        left, right = top.subplots(1, 2)
        sheets = ", estimated from data sheets" * plan.estimated
        top.suptitle(
            f"{plan.model}, {plan.mode}{sheets}. Chosen: {plan.chosen}",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        _step(left, plan)
        _alternatives(right, plan)
        named = list(plan.layers.items())
        for k, axis in enumerate(bottom.subplots(1, columns, squeeze=False)[0]):
            _layers(axis, named[k * rows : (k + 1) * rows], rows)
        order = ", ".join(f"{rank}: {name}" for rank, name in enumerate(plan.devices))
        bottom.suptitle(
            f"shares of every layer, from left to right of {order}",
            x=0.01,
            ha="left",
            fontsize=10,
        )


def _bare(axis: Axes, labels: list[str]) -> None:
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.tick_params(length=0, colors=INK)
    axis.spines[:].set_visible(False)


def _step(axis: Axes, plan: Plan) -> None:
    """A bar per device: seconds in which it computes, only moves data, and waits."""
    _bare(axis, [f"{rank}: {name}" for rank, name in enumerate(plan.devices)])
    if plan.predicted is None:
        axis.set_xlabel("nothing is predicted: the plan was changed by hand")
        axis.set_xticks([])
        return
    p = plan.predicted
    moving = p.communication_s or (0.0,) * plan.world
    idle = [
        max(p.step_s - busy - moved, 0.0)
        for busy, moved in zip(p.compute_s, moving, strict=True)
    ]
    spent = {
        "computes": (BUSY, p.compute_s),
        "moves data": (MOVING, moving),
        "waits": (IDLE, idle),
    }
    if not p.communication_s:
        spent = {"computes": spent["computes"], "moves data or waits": spent["waits"]}
    start = [0.0] * plan.world
    for label, (colour, seconds) in spent.items():
        axis.barh(
            range(plan.world),
            [s * 1e3 for s in seconds],
            0.76,
            start,
            color=colour,
            label=label,
        )
        start = [a + s * 1e3 for a, s in zip(start, seconds, strict=True)]
    axis.set_xlabel(f"milliseconds of a step, {p.step_s * 1e3:.3g} as predicted")
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        borderpad=0,
        fontsize=8,
    )


def _alternatives(axis: Axes, plan: Plan) -> None:
    """Bars of the predicted seconds of whatever else could be done, the chosen one marked."""
    found = sorted((plan.alternatives or {}).items(), key=lambda item: item[1])
    _bare(axis, [name for name, _ in found])
    chosen = [plan.chosen.startswith(name) for name, _ in found]
    seconds = [s * 1e3 for _, s in found]
    axis.barh(
        range(len(found)),
        seconds,
        0.76,
        color=[BUSY if c else "#9db8d6" for c in chosen],
    )
    for row, s in enumerate(seconds):
        axis.text(s, row, f" {s:.3g}", va="center", fontsize=8)
    axis.set_xticks([])
    axis.set_xlabel(
        "predicted milliseconds of a step" if found else "nothing else is predicted"
    )


def _layers(axis: Axes, layers: list[tuple[str, LayerPlan]], rows: int) -> None:
    """A row per layer: its shares, and what is cut."""
    _bare(axis, [shortened(name) for name, _ in layers])
    axis.set_xlim(0, 1.35 if any(layer.split.nodes for _, layer in layers) else 1.2)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.set_xticks([])
    axis.tick_params(labelsize=8)
    for row, (_, layer) in enumerate(layers):
        split = layer.split
        colour, sizes, start = COLOURS[split.kind], split.sizes, 0.0
        for rank, (size, width) in enumerate(
            zip(sizes or (1,), split.shares or (1.0,), strict=True)
        ):
            shade = 1 - 0.55 * rank / max(len(sizes) - 1, 1)
            axis.barh(
                row,
                width,
                0.8,
                start,
                color=colour,
                alpha=shade,
                edgecolor="white",
                linewidth=0.6,
            )
            said = (
                str(size)
                if width < 1
                else f"all on device {rank}"
                if sizes
                else "every device computes all"
            )
            if width > 0.03 * len(str(size)):
                ink = "white" if shade > 0.6 else INK
                axis.text(
                    start + width / 2,
                    row,
                    said,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=ink,
                )
            start += width
        kind = f"sample x {split.kind}" if split.nodes else split.kind
        axis.text(1.015, row, kind, va="center", fontsize=8, color=colour)


def shortened(name: str) -> str:
    """Shortens a long dotted name, as in ``e.s.12.layers.35.layer.1.convolution``."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if len(".".join(parts)) <= NAME:
            break
        parts[i] = part if part.isdigit() else part[:1]
    return ".".join(parts)
