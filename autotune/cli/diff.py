"""Comparison of two plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from hetconv.autotune.report.text import (
    megabytes,
    milliseconds,
    seconds_of,
    sent_bytes,
    shape_text,
    split_text,
)
from hetconv.schemas.plan import LayerPlan, Plan

WHOLE: dict[str, Callable[[Plan], str]] = {
    "devices": lambda p: ", ".join(p.devices),
    "model": lambda p: p.model,
    "mode": lambda p: p.mode,
    "inputs": lambda p: ", ".join(map(shape_text, p.inputs)),
    "chosen": lambda p: p.chosen,
    "predicted step, ms": lambda p: milliseconds(
        p.predicted.step_s if p.predicted else None
    ),
    "busy, ms": lambda p: (
        ", ".join(map(milliseconds, p.predicted.compute_s)) if p.predicted else "-"
    ),
    "MB sent": lambda p: megabytes(sent_bytes(p)) if p.predicted else "-",
    "memory, MB": lambda p: (
        ", ".join(map(megabytes, p.predicted.memory_bytes)) if p.predicted else "-"
    ),
}


def show_diff(a: Plan, b: Plan, console: Console) -> bool:
    """Prints what differs between two plans, or that nothing does.

    Returns:
        Whether anything differs.
    """
    whole = [(said, of(a), of(b)) for said, of in WHOLE.items() if of(a) != of(b)]
    layers = [
        (name, *_cells(a.layers.get(name)), *_cells(b.layers.get(name)))
        for name in dict.fromkeys((*a.layers, *b.layers))
        if _cut(a.layers.get(name)) != _cut(b.layers.get(name))
    ]
    others = [
        name
        for name, layer in a.layers.items()
        if name in b.layers and layer.op != b.layers[name].op
    ]
    if whole:
        _print(console, ("", "first", "second"), whole)
    if others:
        console.print(
            f"{len(others)} layers are other operators, or of other shapes: {', '.join(others)}"
        )
    if layers:
        console.print(
            f"{len(layers)} of {len(a.layers.keys() | b.layers.keys())} layers are cut differently"
        )
        _print(
            console,
            ("layer", *("first", "ms", "MB moved"), *("second", "ms", "MB moved")),
            layers,
        )
    if not (whole or others or layers):
        console.print("no difference")
    return bool(whole or others or layers)


def _cut(layer: LayerPlan | None) -> object:
    return (layer.split, layer.chunks) if layer is not None else None


def _cells(layer: LayerPlan | None) -> tuple[str, str, str]:
    if layer is None:
        return "no such layer", "-", "-"
    chunks = f" in {layer.chunks} chunks" if layer.chunks > 1 else ""
    slowest = max(seconds_of(layer), default=None)
    return (
        split_text(layer.split) + chunks,
        milliseconds(slowest),
        megabytes(layer.sent_bytes),
    )


def _print(
    console: Console, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(
            head, justify="right" if head.startswith(("ms", "MB")) else "left"
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
