"""The page: one file that holds all that it shows, and loads nothing."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetconv.errors import HetConvError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.output_file import write
from hetconv.schemas.plan import Plan

from . import figures
from .contents import Contents, Tuning, read, stage_lines, studies_of
from .figures import Figure
from .tables import Table

LIBRARIES = "jinja2", "plotly"
PACKAGE = "hetconv.autotune.report"


@dataclass(frozen=True)
class Figures:
    """Figures of the page, by section."""

    links: tuple[Figure, ...]
    curves: tuple[Figure, ...]
    plan: tuple[Figure, ...]
    trials: tuple[Figure, ...]

    def by_id(self) -> dict[str, Figure]:
        """Returns the figures by the id that the page gives them."""
        return {
            f"{section}-{k}": figure
            for section, found in vars(self).items()
            for k, figure in enumerate(found)
        }


def require_libraries() -> None:
    """Raises `HetConvError` if what the page is made with is not installed."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise HetConvError(
            f"a report needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install {' '.join(missing)}"
        )


def write_report(
    path: str | Path,
    profile: ClusterProfile,
    plan: Plan | None = None,
    tuning: Tuning | None = None,
) -> None:
    """Writes the page.

    Args:
        path: File to write.
        profile: Profile of a cluster.
        plan: Plan for its devices.
        tuning: What the job that measured the profile knows.

    Raises:
        HetConvError: A library is missing, the plan is for other devices, or the file
            cannot be written.
    """
    require_libraries()
    contents = read(profile, plan, tuning)
    write(
        path,
        _page(
            contents, _figures(profile, plan, tuning), profile.names, plan, tuning
        ).encode(),
    )


def _figures(
    profile: ClusterProfile, plan: Plan | None, tuning: Tuning | None
) -> Figures:
    samples = tuning.record.samples if tuning is not None else {}
    planned = (*figures.usage(plan), *figures.sent(plan)) if plan is not None else ()
    return Figures(
        tuple(figures.links(profile)),
        tuple(figures.curves(profile, samples)),
        planned,
        tuple(map(figures.trials, studies_of(tuning))),
    )


def _page(
    contents: Contents,
    drawn: Figures,
    names: Sequence[str],
    plan: Plan | None,
    tuning: Tuning | None,
) -> str:
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    layers = contents.plan.layers if contents.plan is not None else ()
    data = {
        "figures": {name: figure.to_json() for name, figure in drawn.by_id().items()},
        "timeline": figures.timeline(plan) if plan is not None else None,
        "layers": [
            {
                "notes": layer.notes,
                "tables": [
                    _table(table)
                    for table in (layer.devices, layer.alternatives)
                    if table is not None
                ],
            }
            for layer in layers
        ],
    }
    templates = files(PACKAGE) / "templates"
    texts = {
        name: Markup((templates / f"{name}.{kind}").read_text("utf-8"))
        for name, kind in (("style", "css"), ("page", "js"), ("timeline", "js"))
    }
    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        contents=contents,
        figures=drawn,
        colours=figures.colours(names),
        legend=_legend(names),
        stages=tuple(stage_lines(tuning)) if tuning is not None else (),
        data=_packed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        plotly=_packed(get_plotlyjs()),
        timeline=data["timeline"],
        text=texts,
    )


def _legend(names: Sequence[str]) -> dict[str, str]:
    """Returns the text of each colour."""
    found: dict[str, list[str]] = {}
    for rank, (fill, name) in enumerate(
        zip(figures.colours(names), names, strict=True)
    ):
        found.setdefault(fill, []).append(f"{rank}: {name}")
    return {
        fill: who[0] if len(who) == 1 else f"{len(who)} devices as {who[0]}"
        for fill, who in found.items()
    }


def _table(table: Table) -> dict[str, Any]:
    return asdict(table) | {"numeric": table.numeric, "marked": sorted(table.marked)}


def _packed(text: str) -> str:
    """Returns text as the page's script unpacks it: compressed, and without quotes."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()
