"""Plans and profiles as tables that a person reads."""

from __future__ import annotations

from math import isclose

from rich.console import Console
from rich.table import Column, Table

from hetconv.autotune.report.plan_contents import simulated_s
from hetconv.autotune.report.profile_text import (
    DEVICE_HEADS,
    device_cells,
    disturbance,
    link_lines,
    message_lines,
    origin_lines,
    tuned_lines,
)
from hetconv.autotune.report.text import (
    ESTIMATED,
    REPLICATED,
    alternative_cells,
    chosen_of,
    format_text,
    gather_cells,
    gigabytes,
    megabytes,
    milliseconds,
    seconds_of,
    sent_bytes,
    shape_text,
    sizes_text,
    split_text,
)
from hetconv.errors import PlanError, few
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Plan, Prediction
from hetconv.sharding.split import Split

BAR = 16
FILLS = "█▓▒░"
ROUNDING = 1e-3  # of a simulated step, whose spans are whole nanoseconds


def share_bar(split: Split) -> str:
    """The shares of a split as one bar, a fill per rank."""
    if split.kind == "replicate":
        return REPLICATED
    widths = [round(share * BAR) for share in split.shares]
    bar = "".join(FILLS[r % len(FILLS)] * w for r, w in enumerate(widths))
    return f"{bar} {sizes_text(split)}"


def show_plan(plan: Plan, console: Console) -> None:
    """Prints the layers of a plan with shares, milliseconds and megabytes; then alternatives."""
    marks = [
        f"{FILLS[r % len(FILLS)]} {r}: {name}{' (emulated)' * ('@' in name)}"
        for r, name in enumerate(plan.devices)
    ]
    console.print(
        f"[bold]{plan.model}[/bold], {plan.mode}, input "
        f"{' '.join(map(shape_text, plan.inputs))}"
    )
    console.print(f"devices  {'   '.join(marks)}{f'   ({ESTIMATED})' * plan.estimated}")
    if not plan.estimated:
        console.print(f"memory format  {format_text(plan.memory_format)}")
    table = Table(
        Column("layer", overflow="fold"),
        "kind",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("shares", no_wrap=True)
    for rank in range(plan.world):
        table.add_column(f"ms {rank}", justify="right", no_wrap=True)
    table.add_column("MB moved", justify="right", no_wrap=True)
    for name, layer in plan.layers.items():
        cells = [milliseconds(s) for s in seconds_of(layer)] or ["-"] * plan.world
        table.add_row(
            name,
            layer.split.kind,
            share_bar(layer.split),
            *cells,
            megabytes(layer.sent_bytes),
        )
    console.print(table)
    for name, layer in plan.layers.items():
        if layer.chunks > 1:
            console.print(
                f"{name} is gathered in {layer.chunks} chunks of the batch while it is computed"
            )
    if plan.gathers:
        sent = megabytes(sum(g.sent_bytes for g in plan.gathers))
        console.print(
            f"{len(plan.gathers)} operators run on gathered tensors, {sent} MB: --gathers "
            "lists them"
        )
    console.print(f"chosen: [bold]{plan.chosen}[/bold]")
    if plan.predicted is not None:
        _show_step(plan, plan.predicted, console)


def _show_step(plan: Plan, p: Prediction, console: Console) -> None:
    """Prints the step of a plan, what it sends and takes, and the steps of other plans."""
    others = sorted((plan.alternatives or {}).items(), key=lambda item: item[1])
    predicted_s = simulated_s(plan, p)
    measured = not isclose(p.step_s, predicted_s, rel_tol=ROUNDING)
    if measured:
        console.print(f"measured step {milliseconds(p.step_s)} ms")
    busy = ", ".join(map(milliseconds, p.compute_s))
    console.print(
        f"predicted step {milliseconds(predicted_s)} ms, of which busy {busy} ms; "
        f"{megabytes(sent_bytes(plan))} MB sent"
    )
    console.print(f"memory {', '.join(f'{gigabytes(m)} GB' for m in p.memory_bytes)}")
    for name, seconds in others:
        console.print(f"  {milliseconds(seconds):>10} ms  {name}")
    if measured and others and others[0][1] < p.step_s:
        console.print(
            "hetconv autotune timed whole steps of several plans, and of those this one was the "
            "fastest; the lower times are predictions"
        )


def show_gathers(plan: Plan, console: Console) -> None:
    """Prints what runs on gathered tensors, with the megabytes that are sent for it."""
    if not plan.gathers:
        made = (
            "the plan was changed by hand, and not priced"
            if plan.predicted is None
            else "no operator gathers"
        )
        console.print(f"{made}: nothing to list")
        return
    table = Table(
        "operator", "function", "gives", box=None, header_style="bold", pad_edge=False
    )
    table.add_column("MB sent", justify="right")
    for g in plan.gathers:
        table.add_row(*gather_cells(g))
    console.print(table)
    if plan.estimated:
        console.print(ESTIMATED)


def show_layer(plan: Plan, name: str, console: Console) -> None:
    """Prints the alternatives of a layer, the fastest first, and why they were not chosen.

    Raises:
        PlanError: the plan does not name the layer, or holds no alternatives.
    """
    if name not in plan.layers:
        raise PlanError(f"the plan has no layer {name!r}; it has {few(plan.layers)}")
    if plan.chosen.startswith(SINGLE_DEVICE):
        raise PlanError(
            f"the plan uses the {plan.chosen}: it cuts no layer and considered nothing else "
            f"for {name!r}"
        )
    layer = plan.layers[name]
    chosen = chosen_of(layer)
    if chosen is None:
        raise PlanError(
            f"the plan does not say what else was considered for {name!r}; make it anew with "
            "hetconv plan"
        )
    console.print(
        f"[bold]{name}[/bold], cut by {split_text(layer.split)}; all other layers as planned"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("split", no_wrap=True)
    for head in ("computes", "moves", "slower by"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("because it")
    for c in layer.alternatives:
        table.add_row(
            *alternative_cells(c, chosen), style="bold" if c is chosen else None
        )
    console.print(table)
    console.print(
        "milliseconds of the layer, of what follows it and of the way to the next, operator "
        "after operator"
    )
    if plan.estimated:
        console.print(ESTIMATED)


def show_profile(profile: ClusterProfile, console: Console) -> None:
    """Prints devices, links, what was tuned, and where the numbers come from."""
    table = Table(*DEVICE_HEADS, box=None, header_style="bold", pad_edge=False)
    for rank, device in enumerate(profile.devices):
        table.add_row(*device_cells(rank, device))
    console.print(table)
    if profile.estimated:
        console.print(ESTIMATED)
    if (warning := disturbance(profile)) is not None:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    for lines in (link_lines, message_lines, tuned_lines, origin_lines):
        for line in lines(profile):
            console.print(line)
