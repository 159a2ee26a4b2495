"""What the page says of a plan: layers, devices, alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetconv.planner.candidates import EVEN
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import SINGLE_DEVICE, LayerPlan, Plan, Prediction

from .tables import Cells, Table, fractions
from .text import (
    REPLICATED,
    alternative_cells,
    chosen_of,
    count,
    gather_cells,
    gigabytes,
    megabytes,
    milliseconds,
    seconds_of,
    sent_bytes,
    shape_text,
    sizes_text,
)

MAX_COLUMNS = 4  # devices up to which each has a column of the table of layers


@dataclass(frozen=True)
class LayerRow:
    """Row of the table of layers.

    Attributes:
        name: Name of the layer.
        kind: Kind of its split.
        shares: Share of each device; empty if every device computes all.
        sizes: The same in numbers.
        cells: Milliseconds, megabytes moved, and megabytes of memory.
        devices: Table of what each device has of the layer.
        alternatives: Table of other splits; None where none was considered.
        notes: What else there is to say.
    """

    name: str
    kind: str
    shares: tuple[float, ...]
    sizes: str
    cells: Cells
    devices: Table
    alternatives: Table | None
    notes: str


@dataclass(frozen=True)
class PlanContents:
    """Contents of a plan.

    Attributes:
        title: Name of the model.
        subtitle: Mode, inputs and devices.
        chosen: Name of the plan that was chosen.
        facts: The few most important numbers; see `Contents`.
        heads: Heads of `LayerRow.cells`.
        layers: Row of each layer.
        usage: Table of what each device does in a step; None where nothing is predicted.
        alternatives: Table of other plans; None where there are none.
        gathers: Table of operators that run on gathered tensors; None where there are
            none.
    """

    title: str
    subtitle: str
    chosen: str
    facts: tuple[tuple[str, str, str], ...]
    heads: Cells
    layers: tuple[LayerRow, ...]
    usage: Table | None
    alternatives: Table | None
    gathers: Table | None


def contents_of(profile: ClusterProfile, plan: Plan) -> PlanContents:
    """Collects what the page says of a plan.

    Args:
        profile: Profile of its devices.
        plan: The plan.
    """
    inputs = ", ".join(map(shape_text, plan.inputs))
    p = plan.predicted
    return PlanContents(
        plan.model,
        f"{plan.mode}, input {inputs}, on {count(plan.world, 'device')}",
        plan.chosen,
        tuple(_facts(profile, plan, p)) if p is not None else (),
        _heads(plan),
        tuple(_layer(plan, name, layer) for name, layer in plan.layers.items()),
        _usage(profile, plan, p) if p is not None else None,
        _alternatives(plan),
        _gathers(plan),
    )


def tuned_s(profile: ClusterProfile, plan: Plan) -> float | None:
    """Returns the measured seconds of a step of this very plan, if it was tuned."""
    return next(
        (
            tuned.step_s
            for tuned in profile.plans
            if tuned.mode == plan.mode and dict(tuned.splits) == dict(plan.splits)
        ),
        None,
    )


def _facts(
    profile: ClusterProfile, plan: Plan, p: Prediction
) -> Iterator[tuple[str, str, str]]:
    measured_s = tuned_s(profile, plan)
    predicted_s = simulated_s(plan, p)
    if measured_s is None:
        source = "data sheets" if plan.estimated else "measurements"
        yield "Predicted step", f"{milliseconds(p.step_s)} ms", f"from {source}"
    else:
        off = f"{predicted_s / measured_s - 1:+.0%}"
        predicted = f"predicted {milliseconds(predicted_s)} ms ({off})"
        yield "Measured step", f"{milliseconds(measured_s)} ms", predicted
    for name in (SINGLE_DEVICE, EVEN):
        if seconds := (plan.alternatives or {}).get(name):
            gain = f"{seconds / p.step_s:.2f}x"
            yield f"Against {name}", gain, f"which takes {milliseconds(seconds)} ms"
    busiest = max(p.compute_s) / (predicted_s or 1.0)
    yield "Busiest device", f"{busiest:.0%}", "of the predicted step it computes"
    yield (
        "Sent per step",
        f"{megabytes(sent_bytes(plan))} MB",
        "by all devices together",
    )
    memory = max(p.memory_bytes)
    rank = p.memory_bytes.index(memory)
    most = f"on {rank}: {plan.devices[rank]}, which needs most"
    yield "Memory", f"{gigabytes(memory)} GB", most


def _heads(plan: Plan) -> Cells:
    times = (
        tuple(f"ms {rank}" for rank in range(plan.world))
        if plan.world <= MAX_COLUMNS
        else ("slowest ms", "mean ms")
    )
    return *times, "MB moved", "most MB held"


def _layer(plan: Plan, name: str, layer: LayerPlan) -> LayerRow:
    split, seconds = layer.split, seconds_of(layer)
    replicated = split.kind == "replicate"
    times = seconds
    if seconds and plan.world > MAX_COLUMNS:
        times = [max(seconds), sum(seconds) / len(seconds)]
    blank = ("-",) * (len(_heads(plan)) - 2)
    held = megabytes(max(layer.memory_bytes)) if layer.memory_bytes else "-"
    chosen = chosen_of(layer)
    heads = "split", "computes ms", "moves ms", "slower by ms", "because it"
    others = tuple(alternative_cells(c, chosen) for c in layer.alternatives if chosen)
    marked = frozenset(k for k, c in enumerate(layer.alternatives) if c is chosen)
    notes = [f"gathered in {layer.chunks} chunks of the batch"] * (layer.chunks > 1)
    if layer.fusible:
        notes.append(f"followed by {', '.join(layer.fusible)}, which may be fused")
    return LayerRow(
        name,
        f"sample x {split.kind}" if split.nodes else split.kind,
        () if replicated else tuple(split.shares),
        REPLICATED if replicated else sizes_text(split),
        (
            *(tuple(map(milliseconds, times)) or blank),
            megabytes(layer.sent_bytes),
            held,
        ),
        _by_device(plan, layer),
        Table("Alternatives", heads, others, marked) if chosen is not None else None,
        "; ".join(notes),
    )


def _by_device(plan: Plan, layer: LayerPlan) -> Table:
    ranks, none = range(plan.world), (None,) * plan.world
    sizes = [str(size) for size in layer.split.sizes] or ["all"] * plan.world
    memory = [megabytes(size) for size in layer.memory_bytes] or ["-"] * plan.world
    return Table(
        "Devices",
        ("device", "share", "forward ms", "backward ms", "MB held"),
        tuple(
            (
                f"{rank}: {plan.devices[rank]}",
                sizes[rank],
                milliseconds((layer.forward_s or none)[rank], 3),
                milliseconds((layer.backward_s or none)[rank], 3),
                memory[rank],
            )
            for rank in ranks
        ),
    )


def simulated_s(plan: Plan, p: Prediction) -> float:
    """Returns the seconds of the predicted step, also where whole steps were measured."""
    return plan.timeline.step_s if plan.timeline is not None else p.step_s


def idle_s(plan: Plan, p: Prediction) -> list[float]:
    """Returns the seconds of the predicted step in which each device waits."""
    step_s = simulated_s(plan, p)
    return [max(step_s - busy, 0.0) for busy in p.busy_s]


def _usage(profile: ClusterProfile, plan: Plan, p: Prediction) -> Table:
    moves = p.communication_s or (None,) * plan.world
    waits = "waits ms" if p.communication_s else "moves data or waits ms"
    sent = [sum(row) for row in p.sent_bytes]
    rows = (
        (
            f"{rank}: {name}",
            milliseconds(p.compute_s[rank]),
            milliseconds(moves[rank]),
            milliseconds(idle_s(plan, p)[rank]),
            megabytes(sent[rank]),
            gigabytes(p.memory_bytes[rank]),
            gigabytes(profile.devices[rank].memory_bytes),
        )
        for rank, name in enumerate(plan.devices)
    )
    times, sizes = ("computes ms", "moves data ms", waits), ("MB sent", "GB needed")
    heads = "device", *times, *sizes, "GB there"
    return Table("Devices in a step", heads, tuple(rows))


def _alternatives(plan: Plan) -> Table | None:
    if not plan.alternatives:
        return None
    found = sorted(plan.alternatives.items(), key=lambda item: item[1])
    step_s = plan.predicted.step_s if plan.predicted is not None else found[0][1]
    chosen = [k for k, (n, _) in enumerate(found) if plan.chosen.startswith(n)]
    return Table(
        "Plans of the whole model",
        ("plan", "slower by", "ms a step"),
        tuple(
            (name, f"{seconds / step_s - 1:+.1%}", milliseconds(seconds))
            for name, seconds in found
        ),
        frozenset(chosen),
        fractions([seconds for _, seconds in found]),
    )


def _gathers(plan: Plan) -> Table | None:
    heads = "operator", "function", "gives", "MB sent"
    rows = tuple(map(gather_cells, plan.gathers))
    return Table("Operators on gathered tensors", heads, rows) if rows else None
