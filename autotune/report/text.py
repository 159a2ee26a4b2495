"""Numbers and splits as text, the same in tables of the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence

from hetconv.schemas.plan import Alternative, GatheredOp, LayerPlan, Plan
from hetconv.sharding.conv_spec import MemoryFormat
from hetconv.sharding.layout import spans
from hetconv.sharding.split import Split, ratio_text

ESTIMATED = "estimated from data sheets, nothing measured"
REPLICATED = "every device computes all"
NEGLIGIBLE_S = 5e-7  # what three decimals of a millisecond do not show


def sizes_text(split: Split) -> str:
    """Returns the sizes of a split, as in ``3:1`` or ``3:1, whole sum``.

    A split of two levels is written node by node, ``3:1 | 2:2, samples 5:3``.
    """
    nodes = spans(split.ranks or (len(split.sizes),))
    text = (
        " | ".join(ratio_text(split.sizes[a:b]) for a, b in nodes)
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


def shape_text(shape: Sequence[int]) -> str:
    """Returns a shape, as in ``1x3x256x256``."""
    return "x".join(map(str, shape))


def count(n: int, what: str) -> str:
    """Returns a number of things, as in ``1 device`` or ``2 devices``."""
    return f"{n} {what}{'s' * (n != 1)}"


def milliseconds(seconds: float | None, decimals: int = 2) -> str:
    """Returns seconds as milliseconds in text; a dash for None."""
    return f"{seconds * 1e3:.{decimals}f}" if seconds is not None else "-"


def megabytes(size: float) -> str:
    """Returns bytes as megabytes in text."""
    return f"{size / 1e6:.2f}"


def format_text(memory_format: MemoryFormat) -> str:
    """Returns in which memory format a model should run."""
    return f"torch.{memory_format}, in which devices were measured and the model should run"


def gigabytes(size: float) -> str:
    """Returns bytes as gigabytes in text."""
    return f"{size / 1e9:.2f}"


def gb_per_s(s_per_byte: float) -> str:
    """Returns seconds per byte as a bandwidth in text."""
    return f"{1e-9 / s_per_byte:.2f} GB/s" if s_per_byte else "no limit"


def seconds_of(layer: LayerPlan) -> list[float]:
    """Returns predicted seconds of a layer on each device; empty if there are none."""
    return [
        sum(passes)
        for passes in zip(
            *filter(None, (layer.forward_s, layer.backward_s)), strict=True
        )
    ]


def sent_bytes(plan: Plan) -> int:
    """Returns the bytes that all ranks send in a predicted step."""
    return sum(map(sum, plan.predicted.sent_bytes)) if plan.predicted else 0


def gather_cells(g: GatheredOp) -> tuple[str, ...]:
    """Returns operator, function, what it gives, and megabytes sent."""
    return g.name, g.function, shape_text(g.shape), megabytes(g.sent_bytes)


def chosen_of(layer: LayerPlan) -> Alternative | None:
    """Returns the alternative of a layer that the plan has; None if it is not known."""
    return next((c for c in layer.alternatives if c.split == layer.split), None)


def reason(c: Alternative, chosen: Alternative) -> str:
    """In words, what makes another split slower than the chosen one, and what speaks for it."""
    if c is chosen:
        return "is chosen"
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


def alternative_cells(c: Alternative, chosen: Alternative) -> tuple[str, ...]:
    """Returns split, milliseconds of three kinds, and why it was not chosen."""
    seconds = c.compute_s, c.communication_s, c.slower_by_s
    return (
        split_text(c.split),
        *(milliseconds(s, 3) for s in seconds),
        reason(c, chosen),
    )
