"""Figures of the page, as Plotly draws them; colours of text and grid are the page's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import inf
from typing import Any

from hetconv.autotune.search.record import Samples, Study
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import Curve, OperatorModel
from hetconv.schemas.plan import Plan, Prediction

from .plan_contents import idle_s

# Okabe and Ito's, told apart by the colour-blind; of ranks, again from the first.
COLOURS = "#0072B2", "#D98200", "#009E73", "#C0649B", "#56A9D6", "#8C5A2B"
MOVES, WAITS = "#6B7785", "#6B778540"
BEST, OTHER = "#009E73", "#6B7785"
HEADROOM = 1.6  # of the highest curve, up to which samples are shown at first
MAX_NAMED = 6  # curves of devices up to which a legend names them
MAX_NUMBERED = 16  # devices up to which cells of a matrix have numbers in them
ROW, NARROW_ROW = 26, 13  # pixels of a device, and where there are many
MARGIN = 110  # pixels above and below an axis
Json = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """Figure of the page.

    Attributes:
        title: Title.
        about: What it shows, in a sentence.
        data: Traces of Plotly.
        layout: Layout of Plotly.
    """

    title: str
    about: str
    data: Sequence[Json]
    layout: Json

    def to_json(self) -> Json:
        """Returns the figure as the page's script reads it."""
        said = {"title": self.title, "about": self.about}
        return said | {"data": self.data, "layout": self.layout}


def colours(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the colour of each device, which is the same everywhere on the page.

    Where devices are more than colours, those of one name share one.

    Args:
        names: Names of the devices, in rank order.
    """
    alike = range(len(names)) if len(names) <= len(COLOURS) else names
    order = {key: k for k, key in enumerate(dict.fromkeys(alike))}
    return tuple(COLOURS[order[key] % len(COLOURS)] for key in alike)


def label(rank: int, name: str) -> str:
    """Returns how figures name a device; Plotly would read tags."""
    return escape(f"{rank}: {name}")


def _row(world: int) -> int:
    return ROW if world <= MAX_NUMBERED else NARROW_ROW


def short(key: str) -> str:
    """Of an operator's key, what tells it from others at a glance."""
    what, _, axis = key.rpartition(" by ")
    return f"{what.partition(' p(')[0]}, by {axis}" if what else key


def curves(
    profile: ClusterProfile, samples: Mapping[str, Sequence[Samples]]
) -> Iterator[Figure]:
    """Yields the curves of each operator, those that take longest first.

    Args:
        profile: Profile of the cluster.
        samples: By operator, what was measured on each rank; it may be empty.
    """
    for group in ("operators", "others"):
        models: dict[str, dict[int, OperatorModel]] = {}
        for rank, device in enumerate(profile.devices):
            for key, model in getattr(device, group).items():
                models.setdefault(key, {})[rank] = model
        slowest = {key: max(map(_whole, of.values())) for key, of in models.items()}
        for key in sorted(models, key=slowest.__getitem__, reverse=True):
            shares = group == "operators"
            found = samples.get(key, ())
            yield _curves(key, models[key], profile.names, found, shares=shares)


def _whole(model: OperatorModel) -> float:
    return sum(c.at(c.shares[-1]) for c in (model.forward, model.backward))


def _curves(
    key: str,
    models: Mapping[int, OperatorModel],
    names: Sequence[str],
    samples: Sequence[Samples],
    *,
    shares: bool,
) -> Figure:
    unit, x_title = (100, "share, %") if shares else (1e-6, "MB read and written")
    fills = colours(names)
    alike: dict[tuple[Curve, Curve], list[int]] = {}
    for rank, model in models.items():
        alike.setdefault((model.forward, model.backward), []).append(rank)
    data: list[Json] = []
    beyond, top = 0, HEADROOM * 1e3 * max(max(c.seconds) for k in alike for c in k)
    for both, ranks in alike.items():
        who = label(ranks[0], names[ranks[0]]) + ", …" * (len(ranks) > 1)
        for which, curve, dash in zip(
            ("forward", "backward"), both, ("solid", "dash"), strict=True
        ):
            line = {"color": fills[ranks[0]], "dash": dash, "width": 2}
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{who}, {which}",
                    "x": [_rounded(x * unit) for x in curve.shares],
                    "y": [_rounded(s * 1e3) for s in curve.seconds],
                    "line": line,
                    "marker": {"size": 6, "symbol": _symbol(which)},
                }
            )
            points = [
                (_rounded(x * unit), _rounded(s * 1e3))
                for rank in ranks
                if rank < len(samples)
                for x, passes in samples[rank].items()
                for s in getattr(passes, which)
            ]
            beyond += sum(ms > top for _, ms in points)
            if points:
                data.append(_points(points, f"{who}, {which}, measured", which, line))
    said = f"; {beyond} slower samples are above the axis" if beyond else ""
    measured = "Every sample, and the curve fitted to them" if samples else "Fits"
    return Figure(
        short(key),
        f"{measured}: milliseconds of a pass by {x_title}{said}.",
        data,
        {
            "xaxis": {"title": {"text": x_title}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "milliseconds"}, "range": [0, top or 1.0]},
            "height": 380,
            "showlegend": len(alike) <= MAX_NAMED,
        },
    )


def _rounded(number: float) -> float:
    """Returns six digits, which are more than anything is measured to."""
    return float(f"{number:.6g}")


def _symbol(which: str) -> str:
    return "circle" if which == "forward" else "circle-open"


def _points(
    points: Sequence[tuple[float, float]], name: str, which: str, line: Json
) -> Json:
    x, y = zip(*points, strict=True)
    marker = {"color": line["color"], "size": 5, "symbol": _symbol(which)}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": marker | {"opacity": 0.5},
        "showlegend": False,
    }


def links(profile: ClusterProfile) -> Iterator[Figure]:
    """Yields latency and bandwidth between all ranks, unless all links are alike."""
    ranks = range(profile.world)
    if len({(p.latency_s, p.s_per_byte) for p in profile.links.values()}) < 2:
        return
    pairs = [[None if a == b else profile.link(a, b) for b in ranks] for a in ranks]
    latency = [[p.latency_s * 1e6 if p else None for p in row] for row in pairs]
    speed = [
        [1e-9 / (p.s_per_byte or inf) if p else None for p in row] for row in pairs
    ]
    names = profile.names
    yield _matrix("Latency", "microseconds", latency, names)
    yield _matrix("Bandwidth", "GB/s", speed, names)


def sent(plan: Plan) -> Iterator[Figure]:
    """Yields what every rank sends to every other one in a step, where there are several."""
    if plan.predicted is not None and plan.world > 2:
        cells = [
            [None if a == b else size / 1e6 for b, size in enumerate(row)]
            for a, row in enumerate(plan.predicted.sent_bytes)
        ]
        yield _matrix("Sent in a step", "MB", cells, plan.devices)


def _matrix(
    title: str, unit: str, cells: list[list[float | None]], names: Sequence[str]
) -> Figure:
    ranks = [str(rank) for rank in range(len(names))]
    known = [cell for row in cells for cell in row if cell is not None]
    numbers: Json = {"zmin": 0, "zmax": max(known) or 1.0}
    if len(names) <= MAX_NUMBERED:
        numbers["texttemplate"] = "%{z:.3g}"
    return Figure(
        f"{title}, {unit}",
        "From the rank of the row to the rank of the column.",
        [
            {
                "type": "heatmap",
                "z": cells,
                "x": ranks,
                "y": [label(rank, name) for rank, name in enumerate(names)],
                "colorscale": "Cividis",
                "colorbar": {"thickness": 10},
                "hovertemplate": f"%{{y}} to %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
                **numbers,
            }
        ],
        {
            "xaxis": {
                "title": {"text": "to rank"},
                "type": "category",
                "showgrid": False,
                "nticks": MAX_NUMBERED,
                "tickangle": 0,
            },
            "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
            "height": max(300, _row(len(names)) * len(names) + MARGIN),
        },
    )


def usage(plan: Plan) -> Iterator[Figure]:
    """Yields what each device does in a predicted step."""
    p = plan.predicted
    if p is None:
        return
    names = [label(rank, name) for rank, name in enumerate(plan.devices)]
    yield Figure(
        "Where the time goes",
        "Milliseconds of a step in which each device computes, moves data, and waits.",
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": names,
                "x": [s * 1e3 for s in seconds],
                "marker": {"color": fill},
                "hovertemplate": f"%{{y}} {name} %{{x:.3f}} ms<extra></extra>",
                "showlegend": False,
            }
            for name, fill, seconds in _spent(plan, p)
        ],
        {
            "barmode": "stack",
            "xaxis": {"title": {"text": "milliseconds of a step"}},
            "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
            "bargap": 0.25,
            "height": _row(plan.world) * plan.world + MARGIN,
        },
    )


def _spent(plan: Plan, p: Prediction) -> Iterator[tuple[str, Any, Sequence[float]]]:
    yield "computes", colours(plan.devices), p.compute_s
    if p.communication_s:
        yield "moves data", MOVES, p.communication_s
    waits = "waits" if p.communication_s else "moves data or waits"
    yield waits, WAITS, idle_s(plan, p)


def trials(study: Study) -> Figure:
    """Returns the trials of a study in order, and the best one up to each."""
    values = [t.value if t.value is not None else inf for t in study.trials]
    best = [b if b < inf else None for b in accumulate(values, min)]
    fastest = values.index(min(values))
    return Figure(
        study.title,
        f"Step time of each trial, as a multiple of: {study.baseline or 'its baseline'}.",
        [
            {
                "type": "scatter",
                "mode": "markers",
                "name": "trial",
                "x": [*range(1, len(values) + 1)],
                "y": [value if value < inf else None for value in values],
                "text": [escape(t.what) for t in study.trials],
                "marker": {
                    "size": 9,
                    "color": [
                        BEST if k == fastest else OTHER for k in range(len(values))
                    ],
                },
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": "best so far",
                "x": [*range(1, len(values) + 1)],
                "y": best,
                "line": {"shape": "hv", "color": BEST, "width": 1.5},
            },
        ],
        {
            "xaxis": {"title": {"text": "trial"}, "dtick": max(1, len(values) // 10)},
            "yaxis": {"title": {"text": "of the baseline"}},
            "height": 280,
        },
    )


def timeline(plan: Plan) -> Json | None:
    """Returns the simulated step for the page's script, which draws what it zooms to.

    None where nothing was simulated.
    """
    t = plan.timeline
    if t is None:
        return None
    kinds = {
        "computes": t.computes,
        "waits for halos": t.waits_for_halos,
        "moves data": t.transfers,
        "waits for a sender": t.waits_for_sender,
    }
    return {
        "devices": [label(rank, name) for rank, name in enumerate(plan.devices)],
        "colours": colours(plan.devices),
        "moves": MOVES,
        "waits": WAITS,
        "operators": [escape(name) for name in t.forward + t.backward],
        "forward": len(t.forward),
        "step_ms": t.step_s * 1e3,
        "kinds": {
            name: [s.devices, s.operators, s.start_ns, s.duration_ns]
            for name, s in kinds.items()
        },
    }
