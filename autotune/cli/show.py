"""Plans and profiles as tables that a person reads."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Column, Table

from hetconv.errors import PlanError, few
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Alternative, LayerPlan, Plan
from hetconv.sharding.layer_rules import Split
from hetconv.sharding.layout import spans

BAR = 16
FILLS = "█▓▒░"
ESTIMATED = "estimated from data sheets, nothing measured"
NEGLIGIBLE_S = 5e-7  # what three decimals of a millisecond do not show


def share_bar(split: Split) -> str:
    """The shares of a split as one bar, a fill per rank."""
    if split.kind == "replicate":
        return "every device computes all"
    widths = [round(share * BAR) for share in split.shares]
    bar = "".join(FILLS[r % len(FILLS)] * w for r, w in enumerate(widths))
    return f"{bar} {sizes_text(split)}"


def sizes_text(split: Split) -> str:
    """One size per rank: ``3:1``; of two levels node after node, and the samples of
    each: ``3:1 | 2:2, samples 5:3``.

    And whether its sum is whole on every rank: ``3:1, whole sum``.
    """
    nodes = spans(split.ranks or (len(split.sizes),))
    text = (
        " | ".join(":".join(map(str, split.sizes[a:b])) for a, b in nodes)
        + ", whole sum" * split.whole
    )
    return (
        f"{text}, samples {':'.join(str(samples) for _, samples in split.nodes)}"
        if split.nodes
        else text
    )


def split_text(split: Split) -> str:
    return f"{split.kind} {sizes_text(split)}".strip()


def milliseconds(seconds: float | None, decimals: int = 2) -> str:
    return f"{seconds * 1e3:.{decimals}f}" if seconds is not None else "-"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.2f}"


def seconds_of(layer: LayerPlan) -> list[float]:
    """Predicted seconds of a layer on each device, forward and backward; none if
    nothing was predicted.
    """
    return [
        sum(passes)
        for passes in zip(
            *filter(None, (layer.forward_s, layer.backward_s)), strict=True
        )
    ]


def show_plan(plan: Plan, console: Console) -> None:
    """Layer, kind, shares as bars, predicted milliseconds per device and megabytes
    moved; then the alternatives.
    """
    marks = [
        f"{FILLS[r % len(FILLS)]} {r}: {name}{' (emulated)' * ('@' in name)}"
        for r, name in enumerate(plan.devices)
    ]
    console.print(
        f"[bold]{plan.model}[/bold], {plan.mode}, input "
        f"{' '.join('x'.join(map(str, s)) for s in plan.inputs)}"
    )
    console.print(f"devices  {'   '.join(marks)}{f'   ({ESTIMATED})' * plan.estimated}")
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
        sent = sum(g.sent_bytes for g in plan.gathers) / 1e6
        console.print(
            f"{len(plan.gathers)} operators run on gathered tensors, {sent:.2f} MB: --gathers "
            "lists them"
        )
    console.print(f"chosen: [bold]{plan.chosen}[/bold]")
    if plan.predicted is not None:
        p = plan.predicted
        busy = ", ".join(f"{b * 1e3:.2f}" for b in p.busy_s)
        sent = sum(map(sum, p.sent_bytes)) / 1e6
        console.print(
            f"predicted step {p.step_s * 1e3:.2f} ms, of which busy {busy} ms; {sent:.2f} MB sent"
        )
        console.print(
            f"memory {', '.join(f'{m / 1e9:.2f} GB' for m in p.memory_bytes)}"
        )
    for name, seconds_ in sorted(
        (plan.alternatives or {}).items(), key=lambda item: item[1]
    ):
        console.print(f"  {seconds_ * 1e3:10.2f} ms  {name}")


def show_gathers(plan: Plan, console: Console) -> None:
    """What runs on gathered tensors, with the megabytes that are sent for it, forward
    and backward.
    """
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
        table.add_row(
            g.name, g.function, "x".join(map(str, g.shape)), f"{g.sent_bytes / 1e6:.2f}"
        )
    console.print(table)
    if plan.estimated:
        console.print(ESTIMATED)


def show_layer(plan: Plan, name: str, console: Console) -> None:
    """The splits that a layer could have had, the least costly first: milliseconds, and
    why it has none of the others.

    Raises `PlanError` for a layer that the plan does not name, and if it does not know
    what was considered.
    """
    if name not in plan.layers:
        raise PlanError(f"the plan has no layer {name!r}; it has {few(plan.layers)}")
    if plan.chosen.startswith(SINGLE_DEVICE):
        raise PlanError(
            f"the plan uses the {plan.chosen}: it cuts no layer and considered nothing else "
            f"for {name!r}"
        )
    layer = plan.layers[name]
    chosen = next((c for c in layer.alternatives if c.split == layer.split), None)
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
        cells = (milliseconds(s, 3) for s in (c.compute_s, c.movement_s, c.slower_by_s))
        table.add_row(
            split_text(c.split),
            *cells,
            "[bold]is chosen[/bold]" if c is chosen else _why(c, chosen),
        )
    console.print(table)
    console.print(
        "milliseconds of the layer, of what follows it and of the way to the next, operator "
        "after operator"
    )
    if plan.estimated:
        console.print(ESTIMATED)


def _why(c: Alternative, chosen: Alternative) -> str:
    """In words, what makes another split slower than the chosen one, and what speaks for it."""
    more = {
        "computes": c.compute_s - chosen.compute_s,
        "moves": c.movement_s - chosen.movement_s,
    }
    against = [f"{verb} longer" for verb, s in more.items() if s > NEGLIGIBLE_S]
    for_it = [f"{verb} less" for verb, s in more.items() if s < -NEGLIGIBLE_S]
    return (
        ", but ".join(" and ".join(said) for said in (against, for_it) if said)
        or "takes as long"
    )


def show_profile(profile: ClusterProfile, console: Console) -> None:
    """Devices, links and tuned ratios."""
    table = Table(
        "rank",
        "device",
        "memory",
        "conv",
        "copy",
        "operators",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for rank, d in enumerate(profile.devices):
        rate = ", ".join(f"{v / 1e9:.0f} GFLOP/s {k}" for k, v in d.flops_per_s.items())
        name = d.name + " (emulated)" * d.emulated
        memory = f"{d.memory_bytes / 1e9:.0f} GB"
        table.add_row(
            str(rank),
            name,
            memory,
            rate,
            f"{d.bytes_per_s / 1e9:.0f} GB/s",
            str(len(d.operators)),
        )
    console.print(table)
    if profile.estimated:
        console.print(ESTIMATED)
    for pair, link in profile.links.items():
        console.print(
            f"link {pair}: {link.latency_s * 1e6:.0f} us, {1e-9 / link.s_per_byte:.2f} GB/s"
        )
    for rank, d in enumerate(profile.devices):
        if d.copying is not None:
            sends, joins, adds = (
                1e-9 / s for s in (d.copying.sends, d.copying.joins, d.copying.adds)
            )
            console.print(
                f"rank {rank} sends {sends:.1f}, joins {joins:.1f} and adds {adds:.1f} GB/s "
                "through memory"
            )
    for wire in profile.shared:
        console.print(
            f"{wire.name}: {1e-9 / wire.s_per_byte:.2f} GB/s, shared by {len(wire.pairs)} "
            "pairs of devices"
        )
    if profile.overlap < 1:
        console.print(
            f"halos {profile.overlap:.0%} of the shorter of computing and moving them is hidden"
        )
    if (profile.latency_at_work, profile.bytes_at_work) != (1, 1):
        more = (
            f"{profile.latency_at_work:g} times these latencies and "
            f"{profile.bytes_at_work:g} times the bytes' time"
        )
        console.print(f"messages between devices at work have {more}")
    for t in profile.tuned:
        weights, computed = (
            ":".join(map(str, w)) for w in (t.weights, t.computed_weights)
        )
        console.print(
            f"tuned {t.mode} by {t.kind}: {weights}, {t.step_s * 1e3:.1f} ms a step "
            f"(computed {computed}, {t.computed_step_s * 1e3:.1f} ms; {t.trials} trials)"
        )
    for p in profile.plans:
        beside = (
            f" ({p.alone}, {p.alone_s * 1e3:.1f} ms)" if p.alone_s is not None else ""
        )
        console.print(
            f"plan for {p.mode} of {p.graph}: {p.name}, {p.step_s * 1e3:.1f} ms a step{beside}"
        )
    for c in profile.chunks:
        s, of = (
            c.spec,
            f"{c.seconds * 1e3:.2f} ms in {c.chunks} chunks"
            if c.chunks > 1
            else "one piece",
        )
        x, kernel = ("x".join(map(str, n)) for n in (s.x_shape, s.kernel))
        console.print(
            f"gathered {x} by {s.K} filters {kernel}, {':'.join(map(str, c.sizes))}: {of} "
            f"(in one piece {c.unchunked_s * 1e3:.2f} ms)"
        )
    for device, n in Counter(t.device for t in profile.tiles).items():
        by_aten = sum(t.choice == "aten" for t in profile.tiles if t.device == device)
        console.print(
            f"tiles of {device}: {n} passes tuned, {by_aten} of them left to ATen"
        )
    for rank, d in enumerate(profile.devices):
        if d.identity is not None:
            console.print(
                f"rank {rank}: {d.identity}{f', measured with {d.measured}' if d.measured else ''}"
            )
    for where, text in profile.fingerprint.items():
        console.print(f"{where}: {text}")
