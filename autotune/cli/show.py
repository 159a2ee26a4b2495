"""Plans and profiles as tables that a person reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table

from hetconv.errors import PlanError, few
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, Alternative, LayerPlan, Plan
from hetconv.sharding.layout import spans
from hetconv.sharding.split import Split

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
    """Returns the sizes of a split, as in ``3:1`` or ``3:1, whole sum``.

    A split of two levels is written node by node, ``3:1 | 2:2, samples 5:3``.
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
    """Returns kind and sizes of a split."""
    return f"{split.kind} {sizes_text(split)}".strip()


def milliseconds(seconds: float | None, decimals: int = 2) -> str:
    """Returns seconds as milliseconds in text; a dash for None."""
    return f"{seconds * 1e3:.{decimals}f}" if seconds is not None else "-"


def megabytes(size: float) -> str:
    """Returns bytes as megabytes in text."""
    return f"{size / 1e6:.2f}"


def seconds_of(layer: LayerPlan) -> list[float]:
    """Returns predicted seconds of a layer on each device; empty if there are none."""
    return [
        sum(passes)
        for passes in zip(
            *filter(None, (layer.forward_s, layer.backward_s)), strict=True
        )
    ]


def show_plan(plan: Plan, console: Console) -> None:
    """Prints the layers of a plan with shares, milliseconds and megabytes; then alternatives."""
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
        busy = ", ".join(f"{b * 1e3:.2f}" for b in p.compute_s)
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
        table.add_row(
            g.name, g.function, "x".join(map(str, g.shape)), f"{g.sent_bytes / 1e6:.2f}"
        )
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
        cells = (
            milliseconds(s, 3) for s in (c.compute_s, c.communication_s, c.slower_by_s)
        )
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
        "moves": c.communication_s - chosen.communication_s,
    }
    against = [f"{verb} longer" for verb, s in more.items() if s > NEGLIGIBLE_S]
    for_it = [f"{verb} less" for verb, s in more.items() if s < -NEGLIGIBLE_S]
    return (
        ", but ".join(" and ".join(said) for said in (against, for_it) if said)
        or "takes as long"
    )


def show_profile(profile: ClusterProfile, console: Console) -> None:
    """Prints devices, links, what was tuned, and where the numbers come from."""
    console.print(_devices(profile))
    if profile.estimated:
        console.print(ESTIMATED)
    if (warning := disturbed(profile)) is not None:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    for line in (*_messages(profile), *_tuned(profile), *_origins(profile)):
        console.print(line)


def disturbed(profile: ClusterProfile) -> str | None:
    """Says what was measured while something else used the devices, and what to do."""
    if not profile.disturbed:
        return None
    what = ", ".join(f"{d.what} ({d.slower:.1f}x)" for d in profile.disturbed)
    return (
        "something else used the devices, so that one and the same work took longer, while "
        f"these were measured: {what}. Times and plans may be wrong: close other programs and run "
        "hetconv autotune again"
    )


def _devices(profile: ClusterProfile) -> Table:
    heads = ("rank", "device", "memory", "conv", "copy", "operators")
    table = Table(*heads, box=None, header_style="bold", pad_edge=False)
    for rank, d in enumerate(profile.devices):
        rate = ", ".join(f"{v / 1e9:.0f} GFLOP/s {k}" for k, v in d.flops_per_s.items())
        table.add_row(
            str(rank),
            d.name + " (emulated)" * d.emulated,
            f"{d.memory_bytes / 1e9:.0f} GB",
            rate,
            f"{d.bytes_per_s / 1e9:.0f} GB/s",
            str(len(d.operators)),
        )
    return table


def _messages(profile: ClusterProfile) -> Iterator[str]:
    for pair, link in profile.links.items():
        yield f"link {pair}: {link.latency_s * 1e6:.0f} us, {_gb_per_s(link.s_per_byte)}"
    for rank, d in enumerate(profile.devices):
        if (c := d.copying) is not None:
            yield (
                f"rank {rank} sends {1e-9 / c.sends:.1f}, joins {1e-9 / c.joins:.1f} and "
                f"adds {1e-9 / c.adds:.1f} GB/s through memory"
            )
    for wire in profile.shared:
        pairs = f"shared by {len(wire.pairs)} pairs of devices"
        yield f"{wire.name}: {_gb_per_s(wire.s_per_byte)}, {pairs}"
    if profile.overlap < 1:
        hidden = "of the shorter of computing and moving them is hidden"
        yield f"halos {profile.overlap:.0%} {hidden}"
    if (profile.latency_at_work, profile.bytes_at_work) != (1, 1):
        yield (
            f"messages between devices at work have {profile.latency_at_work:g} times "
            f"these latencies and {profile.bytes_at_work:g} times the bytes' time"
        )


def _tuned(profile: ClusterProfile) -> Iterator[str]:
    for t in profile.tuned:
        yield (
            f"tuned {t.mode} by {t.kind}: {_ratio(t.weights)}, {_ms(t.step_s)} a step "
            f"(computed {_ratio(t.computed_weights)}, {_ms(t.computed_step_s)}; "
            f"{t.trials} trials)"
        )
    for p in profile.plans:
        beside = f" ({p.alone}, {_ms(p.alone_s)})" if p.alone_s is not None else ""
        yield f"plan for {p.mode} of {p.graph}: {p.name}, {_ms(p.step_s)} a step{beside}"
    for c in profile.chunks:
        chunks = f"{milliseconds(c.seconds)} ms in {c.chunks} chunks"
        x, kernel = ("x".join(map(str, n)) for n in (c.spec.x_shape, c.spec.kernel))
        yield (
            f"gathered {x} by {c.spec.K} filters {kernel}, {_ratio(c.sizes)}: "
            f"{chunks if c.chunks > 1 else 'one piece'} "
            f"(in one piece {milliseconds(c.unchunked_s)} ms)"
        )
    for device, n in Counter(t.device for t in profile.tiles).items():
        by_aten = sum(t.choice == "aten" for t in profile.tiles if t.device == device)
        yield f"tiles of {device}: {n} passes tuned, {by_aten} of them left to ATen"


def _origins(profile: ClusterProfile) -> Iterator[str]:
    for rank, d in enumerate(profile.devices):
        if d.identity is not None:
            measured = f", measured with {d.measured}" if d.measured else ""
            yield f"rank {rank}: {d.identity}{measured}"
    for where, text in profile.fingerprint.items():
        yield f"{where}: {text}"


def _gb_per_s(s_per_byte: float) -> str:
    return f"{1e-9 / s_per_byte:.2f} GB/s"


def _ratio(weights: Sequence[int]) -> str:
    return ":".join(map(str, weights))


def _ms(seconds: float) -> str:
    return f"{milliseconds(seconds, 1)} ms"
