"""The picture of a rebalanced training: seconds of each step, with the moves marked."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hetconv.schemas.output_file import write

from .scenarios import Schedule

LINES = {
    "fixed_s": ("the plan stays", "#dd7a26"),
    "tuned_s": ("tuned for the slow state", "#2f9e6e"),
    "rebalanced_s": ("rebalanced", "#2b6cb0"),
}
SLOW, MOVE = "#eeeeee", "#c0392b"


def draw(courses: dict[str, Any], schedule: Schedule, path: Path) -> None:
    """Draws the seconds of all steps, a panel per scenario."""
    figure = Figure(figsize=(9, 3 * len(courses)), layout="constrained")
    panels = figure.subplots(len(courses), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, course) in zip(panels, courses.items(), strict=True):
        panel.axvspan(
            schedule.slow_from, schedule.slow_until, color=SLOW, label="rank 1 is slow"
        )
        for key, (label, colour) in LINES.items():
            panel.plot([s * 1e3 for s in course[key]], colour, lw=0.8, label=label)
        moves = [d["step"] for d in course["decisions"] if d["action"] != "keep"]
        for n, step in enumerate(moves):
            panel.axvline(
                step, color=MOVE, ls="--", lw=1, label="_" if n else "plan changes"
            )
        panel.set(title=name, ylabel="ms per step", ylim=(0, None))
        panel.margins(x=0)
    panels[-1].set_xlabel("step")
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", fontsize=8, ncols=5)
    content = BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=120)
    write(path, content.getvalue())
