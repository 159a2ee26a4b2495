"""A profile in words: its devices, links, what was tuned, and where the numbers come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_model import DeviceModel, LinkModel
from hetconv.sharding.split import ratio_text

from .text import gb_per_s, milliseconds, shape_text

DEVICE_HEADS = "rank", "device", "memory", "conv", "copy", "operators"


def device_cells(rank: int, device: DeviceModel) -> tuple[str, ...]:
    """Returns what `DEVICE_HEADS` names."""
    rates = (
        f"{rate / 1e9:.0f} GFLOP/s {dtype}"
        for dtype, rate in device.flops_per_s.items()
    )
    return (
        str(rank),
        device.name + " (emulated)" * device.emulated,
        f"{device.memory_bytes / 1e9:.0f} GB",
        ", ".join(rates),
        f"{device.bytes_per_s / 1e9:.0f} GB/s",
        str(len(device.operators)),
    )


def latency_text(link: LinkModel) -> str:
    """Returns the latency of a link in microseconds."""
    return f"{link.latency_s * 1e6:.0f} us"


def disturbance(profile: ClusterProfile) -> str | None:
    """Says what was measured while something else used the devices, and what to do."""
    if not profile.disturbed:
        return None
    what = ", ".join(f"{d.what} ({d.slower:.1f}x)" for d in profile.disturbed)
    return (
        "something else used the devices, so that one and the same work took longer, while "
        f"these were measured: {what}. Times and plans may be wrong: close other programs and "
        "run hetconv autotune again"
    )


def link_lines(profile: ClusterProfile) -> Iterator[str]:
    """Yields a line for each link."""
    for pair, link in profile.links.items():
        yield f"link {pair}: {latency_text(link)}, {gb_per_s(link.s_per_byte)}"


def message_lines(profile: ClusterProfile) -> Iterator[str]:
    """Yields what messages take beside the links: copies, shared wires, contention."""
    for rank, d in enumerate(profile.devices):
        if (c := d.copying) is not None:
            yield (
                f"rank {rank} sends {1e-9 / c.sends:.1f}, joins {1e-9 / c.joins:.1f} and "
                f"adds {1e-9 / c.adds:.1f} GB/s through memory"
            )
    for wire in profile.shared:
        pairs = f"shared by {len(wire.pairs)} pairs of devices"
        yield f"{wire.name}: {gb_per_s(wire.s_per_byte)}, {pairs}"
    if profile.overlap < 1:
        hidden = "of the shorter of computing and moving them is hidden"
        yield f"halos {profile.overlap:.0%} {hidden}"
    if (profile.latency_at_work, profile.bytes_at_work) != (1, 1):
        yield (
            f"messages between devices at work have {profile.latency_at_work:g} times "
            f"these latencies and {profile.bytes_at_work:g} times the bytes' time"
        )


def tuned_lines(profile: ClusterProfile) -> Iterator[str]:
    """Yields a line for each result of tuning."""
    for t in profile.tuned:
        yield (
            f"tuned {t.mode} by {t.kind}: {ratio_text(t.weights)}, {_ms(t.step_s)} a step "
            f"(computed {ratio_text(t.computed_weights)}, {_ms(t.computed_step_s)}; "
            f"{t.trials} trials)"
        )
    for p in profile.plans:
        beside = f" ({p.alone}, {_ms(p.alone_s)})" if p.alone_s is not None else ""
        yield f"plan for {p.mode} of {p.graph}: {p.name}, {_ms(p.step_s)} a step{beside}"
    for c in profile.chunks:
        chunks = f"{milliseconds(c.seconds)} ms in {c.chunks} chunks"
        x, kernel = map(shape_text, (c.spec.x_shape, c.spec.kernel))
        yield (
            f"gathered {x} by {c.spec.K} filters {kernel}, {ratio_text(c.sizes)}: "
            f"{chunks if c.chunks > 1 else 'one piece'} "
            f"(in one piece {milliseconds(c.unchunked_s)} ms)"
        )
    for device, n in Counter(t.device for t in profile.tiles).items():
        by_aten = sum(t.choice == "aten" for t in profile.tiles if t.device == device)
        yield f"tiles of {device}: {n} passes tuned, {by_aten} of them left to ATen"


def origin_lines(profile: ClusterProfile) -> Iterator[str]:
    """Yields which devices were measured, and under which conditions."""
    for rank, d in enumerate(profile.devices):
        if d.identity is not None:
            measured = f", measured with {d.measured}" if d.measured else ""
            yield f"rank {rank}: {d.identity}{measured}"
    for where, text in profile.fingerprint.items():
        yield f"{where}: {text}"


def _ms(seconds: float) -> str:
    return f"{milliseconds(seconds, 1)} ms"
