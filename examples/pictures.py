"""The pictures of the example: a photograph restored, and what each device did when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from examples.edsr import SCALE
from examples.photographs import Pair, psnr

COLOURS = ("#2b6cb0", "#dd7a26", "#2f9e6e", "#8e5bb5")  # one per device
IDLE, INK, MARK = "#e6e6e6", "#333333", "#c0392b"
ZOOM = (
    330,
    114,
    100,
)  # top, left and size, in pixels of the original, of the part that is enlarged


@dataclass(frozen=True)
class Timeline:
    """A step's length in seconds, and for every device the spans when it computed,
    counted from the step's start.
    """

    seconds: float
    busy: list[list[tuple[float, float]]]


def photographs(pair: Pair, bicubic: Tensor, restored: Tensor, path: Path) -> None:
    """Low resolution, bicubic, restored and original side by side; below each an
    enlarged part of it.
    """
    rows, columns = pair.low.shape[2:]
    shown = {
        f"low resolution\n{columns} × {rows}": F.interpolate(
            pair.low, scale_factor=SCALE, mode="nearest"
        ),
        f"bicubic interpolation\n{psnr(bicubic, pair.high):.2f} dB": bicubic,
        f"restored by the network\n{psnr(restored, pair.high):.2f} dB": restored,
        f"original\n{columns * SCALE} × {rows * SCALE}": pair.high,
    }
    width, ratio = 3.3, rows / columns
    figure = Figure(
        figsize=(width * len(shown), width * (1 + ratio) + 0.5),
        layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.0, hspace=0.0),
    )
    axes = figure.subplots(2, len(shown), height_ratios=(ratio, 1), squeeze=False)
    top, left, size = ZOOM
    for column, (title, image) in enumerate(shown.items()):
        pixels = image[0].clamp(0, 1).movedim(0, -1).numpy()
        whole, part = axes[:, column]
        whole.set_title(title, color=INK, fontsize=12)
        whole.imshow(pixels)
        whole.add_patch(
            Rectangle(
                (left, top), size, size, fill=False, edgecolor="white", linewidth=1.5
            )
        )
        part.imshow(
            pixels[top : top + size, left : left + size], interpolation="nearest"
        )
        for axis in (whole, part):
            axis.set_axis_off()
    figure.savefig(path, dpi=80)


def timelines(
    steps: dict[str, Timeline], alone: float, devices: list[str], path: Path
) -> None:
    """A panel per split, a bar per device, coloured while it computes. ``alone``: a
    step on the first one (s).
    """
    figure = Figure(figsize=(11, 1.75 * len(steps) + 0.9), layout="constrained")
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    end = max(alone, *(step.seconds for step in steps.values())) * 1e3
    labels = [
        f"{device}\n(emulated)" if "@" in device else device for device in devices
    ]
    for axis, (name, step) in zip(axes, steps.items(), strict=True):
        axis.set_title(
            f"{name}, {step.seconds * 1e3:.0f} ms", loc="left", color=INK, fontsize=12
        )
        _bars(axis, step, end)
        axis.axvline(alone * 1e3, color=MARK, linestyle=(0, (4, 3)), linewidth=1.5)
        axis.set_yticks(range(len(labels)), labels)
        axis.set_xlim(0, end * 1.12)
    axes[-1].set_xlabel("milliseconds since the training step began", color=INK)
    keys = [
        Patch(color=colour, label=f"{device} computes")
        for device, colour in zip(devices, COLOURS, strict=False)
    ]
    idle = Patch(color=IDLE, label="waits, or does small work")
    mark = Line2D(
        [],
        [],
        color=MARK,
        linestyle=(0, (4, 3)),
        label=f"{devices[0]} alone would be done",
    )
    figure.legend(
        handles=[*keys, idle, mark],
        loc="outside upper center",
        ncols=6,
        frameon=False,
        labelcolor=INK,
    )
    figure.savefig(path, dpi=110)


def _bars(axis: Axes, step: Timeline, end: float) -> None:
    for row, (busy, colour) in enumerate(zip(step.busy, COLOURS, strict=False)):
        axis.broken_barh([(0, step.seconds * 1e3)], (row - 0.38, 0.76), facecolor=IDLE)
        spans = [(start * 1e3, (stop - start) * 1e3) for start, stop in busy]
        axis.broken_barh(
            spans,
            (row - 0.38, 0.76),
            facecolor=colour,
            edgecolor="white",
            linewidth=0.3,
        )
        share = sum(stop - start for start, stop in busy) / step.seconds
        axis.text(end * 1.012, row, f"busy {share:.0%}", va="center", color=INK)
    axis.invert_yaxis()
    axis.tick_params(length=0, colors=INK)
    axis.spines[:].set_visible(False)
