"""``hetconv report``: a profile and a plan as one page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetconv.schemas.output_file import check_output

from .options import output_option

PAGE = "report.html"


def checked_folder(folder: Path | None) -> Path | None:
    """Refuses a folder to which no page can be written, and missing libraries."""
    if folder is not None:
        from hetconv.autotune.report.page import require_libraries

        require_libraries()
        check_output(folder / PAGE)
    return folder


def report(
    profile: Annotated[
        Path,
        typer.Argument(help="The profile that autotune wrote.", show_default=False),
    ],
    plan: Annotated[
        Path | None,
        typer.Argument(help="A plan for its devices.", show_default=False),
    ] = None,
    output: Annotated[
        Path, output_option("--output", "-o", help="The page to write.")
    ] = Path(PAGE),
) -> None:
    """Write a page about a profile and a plan: one file, which a browser opens offline."""
    from hetconv.autotune.report.page import require_libraries, write_report
    from hetconv.schemas.cluster_profile import ClusterProfile
    from hetconv.schemas.plan import Plan

    require_libraries()
    made = Plan.load(plan) if plan is not None else None
    write_report(output, ClusterProfile.load(profile), made)
    print(f"wrote {output}")
