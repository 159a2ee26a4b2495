"""Figures of a tuning job: trials of its studies, measured layers, and links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import accumulate
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from hetconv.autotune.measure import fit
from hetconv.autotune.search.record import Record, Samples, Study
from hetconv.errors import HetConvError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.output_file import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
INK = "#333333"


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Context with a figure to draw on, which is written when the context ends.

    Args:
        path: the file.
        width: in inches.
        height: in inches.

    Raises:
        HetConvError: the file has no known format, or matplotlib is missing.
    """
    if path.suffix not in FORMATS:
        raise HetConvError(
            f"a picture cannot be written as {path.name!r}; name it *{', *'.join(FORMATS)}"
        )
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(
        {
            "font.size": 9,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
        }
    ):
        drawn = Figure(
            figsize=(width, height),
            layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05),
        )
        yield drawn
        content = BytesIO()
        drawn.savefig(content, format=path.suffix[1:], dpi=110)
    write(path, content.getvalue())


def prepare(folder: Path) -> None:
    """Makes a folder for figures.

    Raises:
        HetConvError: it cannot be made, or matplotlib is missing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise HetConvError(
            f"no picture can be written to {folder} ({e.strerror}); give another folder"
        ) from e
    require_matplotlib()


def require_matplotlib() -> None:
    """Raises `HetConvError` if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise HetConvError(
            f"a picture needs matplotlib ({e}); install it with pip install matplotlib"
        ) from e


if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#2b6cb0",
    "#dd7a26",
    "#2f9e6e",
    "#8e5bb5",
    "#c2477f",
    "#7a5c3e",
)  # of ranks, again from the first
BEST, LATER, BAD = "#2f9e6e", "#8c8c8c", "#c0392b"
HEAVIEST, COLUMNS = 6, 3  # layers that are drawn, and how many of them side by side
HEADROOM = 1.6  # of the highest curve, up to which samples are drawn
ROW, MARGIN = 0.24, 0.9  # inches: of a trial, of what is above and below an axis
WHY = 70  # letters of an error


def draw(record: Record, folder: Path) -> list[Path]:
    """Draws all figures of a tuning job.

    Returns:
        The files written. Studies without trials and the links of one device have none.
    """
    studies = [study for study in record.studies if study.trials]
    layers = heaviest(record)
    found: dict[str, tuple[bool, Callable[[Path], None]]] = {
        "history.svg": (bool(studies), lambda path: plot_history(studies, path)),
        "layers.svg": (
            bool(layers),
            lambda path: plot_layers(layers, record.profile.names, path),
        ),
        "links.svg": (
            record.profile.world > 1,
            lambda path: plot_links(record.profile, path),
        ),
    }
    written = []
    for name, (there, figure_of) in found.items():
        if there:
            figure_of(folder / name)
            written.append(folder / name)
    return written


def plot_history(studies: Sequence[Study], path: Path) -> None:
    """A row per trial, from top to bottom in order."""
    heights = [ROW * len(study.trials) + MARGIN for study in studies]
    with figure(path, 9, sum(heights)) as whole:
        axes = whole.subplots(len(studies), 1, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        for axis, study in zip(axes, studies, strict=True):
            _history(axis, study)


def _history(axis: Axes, study: Study) -> None:
    values = [trial.value if trial.value is not None else inf for trial in study.trials]
    rows, best, fastest = (
        range(len(values)),
        list(accumulate(values, min)),
        values.index(min(values)),
    )
    known = [row for row in rows if best[row] < inf]
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle="--", label=study.baseline)
    axis.step(
        [best[row] for row in known],
        known,
        where="pre",
        color=BEST,
        label="best so far",
    )
    for row, trial in enumerate(study.trials):
        along = (
            axis.get_yaxis_transform()
        )  # in parts of the axis, whose rows are trials
        if trial.value is None:
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axis.text(
                0.01,
                row,
                _cut(trial.why),
                va="center",
                color=BAD,
                transform=along,
                bbox=behind,
            )
        else:
            axis.plot(trial.value, row, "o", color=BEST if row == fastest else LATER)
        said = f"{trial.value:.3f}" if trial.value is not None else "failed"
        axis.text(
            1.01,
            row,
            said,
            va="center",
            color=BAD if trial.value is None else INK,
            transform=along,
        )
    axis.set_yticks(
        rows, [f"{trial.what}  {row + 1}" for row, trial in enumerate(study.trials)]
    )
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.margins(x=0.08)
    axis.set_title(study.title, loc="left")
    axis.set_xlabel(f"step time, as a multiple of: {study.baseline or 'its baseline'}")
    axis.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderpad=0
    )
    axis.spines[["top", "right"]].set_visible(False)


def _cut(text: str) -> str:
    return text if len(text) <= WHY else f"{text[: WHY - 1]}…"


def heaviest(record: Record) -> dict[str, Sequence[Samples]]:
    """Layers along an axis that were measured at several shares, those that take longest first."""
    known = {key for device in record.profile.devices for key in device.operators}
    layers = {
        key: found
        for key, found in record.samples.items()
        if key in known and any(found)
    }
    return dict(
        sorted(
            layers.items(), key=lambda item: max(map(_whole, item[1])), reverse=True
        )[:HEAVIEST]
    )


def _whole(samples: Samples) -> float:
    """Seconds of both passes."""
    return sum(fit.whole_seconds(fit.operator_model(samples))) if samples else 0.0


def plot_layers(
    layers: Mapping[str, Sequence[Samples]], names: Sequence[str], path: Path
) -> None:
    """Draws every sample of some layers, and the curves through their medians."""
    columns, rows = min(COLUMNS, len(layers)), ceil(len(layers) / COLUMNS)
    with figure(path, 4 * COLUMNS, 3 * rows + 0.6) as whole:
        axes = list(whole.subplots(rows, columns, squeeze=False).flat)
        for axis, (key, found) in zip(axes, layers.items(), strict=False):
            _layer(axis, found, names)
            axis.set_title(short(key), fontsize=9, loc="left")
        for axis in axes[len(layers) :]:
            axis.remove()
        handles, labels = axes[0].get_legend_handles_labels()
        said = "the layers that take longest: every sample, and curves through medians"
        whole.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=4,
            frameon=False,
            title=said,
            alignment="left",
        )


def _layer(axis: Axes, found: Sequence[Samples], names: Sequence[str]) -> None:
    """Outliers that would leave no room for the curves are counted, not drawn."""
    models = {
        rank: fit.operator_model(samples)
        for rank, samples in enumerate(found)
        if samples
    }
    top = (
        HEADROOM
        * max(
            max(curve.seconds)
            for m in models.values()
            for curve in (m.forward, m.backward)
        )
        * 1e3
    )
    beyond = 0
    for rank, model in models.items():
        colour = COLOURS[rank % len(COLOURS)]
        passes = (
            ("forward", model.forward, "-", colour),
            ("backward", model.backward, "--", "none"),
        )
        for k, (which, curve, line, fill) in enumerate(passes):
            points = [
                (share * 100, s * 1e3)
                for share, m in found[rank].items()
                for s in (m.forward, m.backward)[k]
            ]
            beyond += sum(ms > top for _, ms in points)
            axis.plot(
                *zip(*points, strict=True),
                "o",
                ms=3.5,
                alpha=0.5,
                mfc=fill,
                mec=colour,
                mew=0.8,
            )
            knots = [
                (share * 100, s * 1e3)
                for share, s in zip(curve.shares, curve.seconds, strict=True)
            ]
            name = f"{rank}: {names[rank]}, {which}"
            axis.plot(
                *zip(*knots, strict=True), line, color=colour, linewidth=1.2, label=name
            )
    axis.set_xlim(0, 105)
    axis.set_ylim(0, min(axis.get_ylim()[1], top) or 1.0)
    axis.set_xlabel("share of the layer, %")
    axis.set_ylabel("milliseconds")
    axis.spines[["top", "right"]].set_visible(False)
    if beyond:
        said = f"not shown: {beyond} slower"
        axis.text(
            0.02,
            0.98,
            said,
            va="top",
            color=LATER,
            fontsize=8,
            transform=axis.transAxes,
        )


def short(key: str) -> str:
    """Of an operator's key, what tells it from others at a glance."""
    what, _, axis = key.rpartition(" by ")
    return f"{what.partition(' p(')[0]}, by {axis}"


def plot_links(profile: ClusterProfile, path: Path) -> None:
    """From every rank, in rows, to every other, in columns."""
    side = max(0.62 * profile.world + 1.6, 3.4)
    with figure(path, 2 * side + 0.8, side) as whole:
        left, right = whole.subplots(1, 2)
        pairs = [
            [None if a == b else profile.link(a, b) for b in range(profile.world)]
            for a in range(profile.world)
        ]
        latency = [
            [link.latency_s * 1e6 if link else None for link in row] for row in pairs
        ]
        speed = [
            [1e-9 / (link.s_per_byte or inf) if link else None for link in row]
            for row in pairs
        ]
        _heat(left, latency, "latency, microseconds", "Oranges", profile.names)
        _heat(right, speed, "bandwidth, GB/s", "Blues", profile.names)


def _heat(
    axis: Axes,
    cells: Sequence[Sequence[float | None]],
    title: str,
    colours: str,
    names: Sequence[str],
) -> None:
    known = [value for row in cells for value in row if value is not None]
    numbers = [
        [value if value is not None else float("nan") for value in row] for row in cells
    ]
    axis.imshow(
        numbers, cmap=colours, vmin=0, vmax=max(known) * 2.2
    )  # so that ink can be read on the darkest
    for a, row in enumerate(cells):
        for b, value in enumerate(row):
            if value is not None:
                axis.text(b, a, f"{value:.3g}", ha="center", va="center", fontsize=8)
    axis.set_yticks(
        range(len(names)), [f"{rank}: {name}" for rank, name in enumerate(names)]
    )
    axis.set_xticks(range(len(names)), [str(rank) for rank in range(len(names))])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(title, loc="left")
    axis.set_xlabel("to rank")
    axis.set_ylabel("from rank")
