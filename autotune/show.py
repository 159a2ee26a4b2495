"""Plans and profiles as tables that a person reads."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from hetconv.plan import Plan
from hetconv.profile import ClusterProfile
from hetconv.rules import Split

BAR = 16
FILLS = "█▓▒░"


def share_bar(split: Split) -> str:
    """The shares of a split as one bar, a fill per rank."""
    if split.kind == "replicate":
        return "every device computes all"
    total = sum(split.sizes)
    widths = [round(s / total * BAR) for s in split.sizes]
    bar = "".join(FILLS[r % len(FILLS)] * w for r, w in enumerate(widths))
    return f"{bar} {':'.join(map(str, split.sizes))}"


def show_plan(plan: Plan, console: Console) -> None:
    """Layer, kind, shares as bars, predicted milliseconds per device and megabytes moved; then the alternatives."""
    marks = [
        f"{FILLS[r % len(FILLS)]} {r}: {name}{' (emulated)' * ('@' in name)}" for r, name in enumerate(plan.devices)
    ]
    console.print(
        f"[bold]{plan.model}[/bold], {plan.mode}, input {' '.join('x'.join(map(str, s)) for s in plan.inputs)}"
    )
    console.print(f"devices  {'   '.join(marks)}{'   (estimated from data sheets, nothing measured)' * plan.estimated}")
    table = Table("layer", "kind", box=None, header_style="bold", pad_edge=False)
    table.add_column("shares", no_wrap=True)
    for device in plan.devices:
        table.add_column(f"ms {device}", justify="right", no_wrap=True)
    table.add_column("MB moved", justify="right", no_wrap=True)
    for name, layer in plan.layers.items():
        seconds = [sum(pair) for pair in zip(layer.forward_s, layer.backward_s or (0.0,) * plan.world, strict=False)]
        cells = [f"{s * 1e3:.2f}" for s in seconds] or ["-"] * plan.world
        table.add_row(name, layer.split.kind, share_bar(layer.split), *cells, f"{layer.sent_bytes / 1e6:.2f}")
    console.print(table)
    for name, layer in plan.layers.items():
        if layer.chunks > 1:
            console.print(f"{name} is gathered in {layer.chunks} chunks of the batch while it is computed")
    if plan.gathers:
        sent = sum(g.sent_bytes for g in plan.gathers) / 1e6
        console.print(f"{len(plan.gathers)} operators run on gathered tensors, {sent:.2f} MB: --gathers lists them")
    console.print(f"chosen: [bold]{plan.chosen}[/bold]")
    if plan.predicted is not None:
        p = plan.predicted
        busy = ", ".join(f"{b * 1e3:.2f}" for b in p.busy_s)
        sent = sum(map(sum, p.sent_bytes)) / 1e6
        console.print(f"predicted step {p.step_s * 1e3:.2f} ms, of which busy {busy} ms; {sent:.2f} MB sent")
        console.print(f"memory {', '.join(f'{m / 1e9:.2f} GB' for m in p.memory_bytes)}")
    for name, seconds_ in sorted((plan.alternatives or {}).items(), key=lambda item: item[1]):
        console.print(f"  {seconds_ * 1e3:10.2f} ms  {name}")


def show_gathers(plan: Plan, console: Console) -> None:
    """What runs on gathered tensors, with the megabytes that are sent for it, forward and backward."""
    if not plan.gathers:
        made = "the plan was changed by hand, and not priced" if plan.predicted is None else "no operator gathers"
        console.print(f"{made}: nothing to list")
        return
    table = Table("operator", "function", "gives", box=None, header_style="bold", pad_edge=False)
    table.add_column("MB sent", justify="right")
    for g in plan.gathers:
        table.add_row(g.name, g.function, "x".join(map(str, g.shape)), f"{g.sent_bytes / 1e6:.2f}")
    console.print(table)


def show_profile(profile: ClusterProfile, console: Console) -> None:
    """Devices, links and tuned ratios."""
    table = Table(
        "rank", "device", "memory", "conv", "copy", "operators", box=None, header_style="bold", pad_edge=False
    )
    for rank, d in enumerate(profile.devices):
        rate = ", ".join(f"{v / 1e9:.0f} GFLOP/s {k}" for k, v in d.flops_per_s.items())
        name = d.name + " (emulated)" * d.emulated
        memory = f"{d.memory_bytes / 1e9:.0f} GB"
        table.add_row(str(rank), name, memory, rate, f"{d.bytes_per_s / 1e9:.0f} GB/s", str(len(d.operators)))
    console.print(table)
    if profile.estimated:
        console.print("estimated from data sheets, nothing measured")
    for pair, link in profile.links.items():
        console.print(f"link {pair}: {link.latency_s * 1e6:.0f} us, {1e-9 / link.s_per_byte:.2f} GB/s")
    for t in profile.tuned:
        weights, computed = (":".join(map(str, w)) for w in (t.weights, t.computed_weights))
        console.print(
            f"tuned {t.mode} by {t.kind}: {weights}, {t.step_s * 1e3:.1f} ms a step "
            f"(computed {computed}, {t.computed_step_s * 1e3:.1f} ms; {t.trials} trials)"
        )
    for c in profile.chunks:
        s, of = c.spec, f"{c.seconds * 1e3:.2f} ms in {c.chunks} chunks" if c.chunks > 1 else "one piece"
        console.print(
            f"gathered {s.N}x{s.C}x{s.H}x{s.W} by {s.K} filters {s.R}x{s.S}, {':'.join(map(str, c.sizes))}: {of} "
            f"(in one piece {c.unchunked_s * 1e3:.2f} ms)"
        )
    for device, n in Counter(t.device for t in profile.tiles).items():
        by_aten = sum(t.choice == "aten" for t in profile.tiles if t.device == device)
        console.print(f"tiles of {device}: {n} passes tuned, {by_aten} of them left to ATen")
    for where, text in profile.fingerprint.items():
        console.print(f"{where}: {text}")
