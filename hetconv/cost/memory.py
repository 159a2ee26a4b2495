"""Bytes that a step holds in the memory of each device: parameters, results, copies of
what arrives. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hetconv.schemas.plan import Mode
from hetconv.sharding.layout import Boxes
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import Graph, Node

from .network import Array, Messages
from .propagate import Transfers
from .redistribution import MovedValue, received_bytes


class MemoryUse(NamedTuple):
    """(P,) bytes of one operator under a plan: its result, copies that are made of what
    arrives for it, and messages.

    ``copies`` live until it is done, in training until its gradient is. ``passing``:
    the most that comes and goes while it waits, in any of its passes.
    """

    result: Array
    receive_buffers: Array
    transient: Array


def result_bytes(graph: Graph, node: Node, sharding: OpSharding) -> list[int]:
    """Bytes of what an operator leaves in memory on each rank; a view leaves nothing."""
    if not _leaves(node):
        return [0] * sharding.output.world
    return [
        box.numel * graph.values[node.outputs[0]].itemsize
        for box in sharding.output.boxes
    ]


def _leaves(node: Node) -> bool:
    return bool(node.outputs) and not node.views


def receive_buffer_bytes(
    transfers: Transfers, messages: Sequence[Messages], world: int, *, apart: bool
) -> Array:
    """(P,) bytes of the tensors that are made of what arrives; ``apart``: see `Network.messages`.

    ``messages``: of all rounds of the transfers. Where nothing arrives nothing is made.
    """
    found, each = np.zeros(world), iter(messages)
    for rounds, itemsize in transfers:
        made = np.zeros(world)
        for (_, wanted), one in zip(
            rounds, each, strict=False
        ):  # each round's tensor is there until the next one's is
            arriving = one.sent_bytes.sum(0)
            made = (
                arriving
                if apart
                else np.where(arriving > 0, _bytes(wanted, itemsize), 0.0)
            )
        found = found + made
    return found


def peak_transient_bytes(messages: Sequence[Messages], world: int) -> Array:
    """(P,) bytes that arrive in the round in which most does."""
    most: Array = (
        np.max([m.sent_bytes.sum(0) for m in messages], axis=0, initial=0.0)
        if messages
        else np.zeros(world)
    )
    return most


def receive_buffer_table(moved: MovedValue) -> Array:
    """(sources, reads, P): `receive_buffer_bytes` of a value that is brought from each
    layout to each of the reads.
    """
    arriving = received_bytes(moved)
    whole = np.array([_bytes(read.boxes, moved.itemsize) for read in moved.reads])
    made = (
        np.where(moved.apart[..., None], arriving, whole)
        if moved.apart is not None
        else whole
    )
    found: Array = np.where(arriving > 0, made, 0.0)
    return found


def _bytes(boxes: Boxes, itemsize: int) -> Array:
    return np.array([box.numel * itemsize for box in boxes], dtype=np.float64)


def parameter_bytes(
    graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode, layer: str | None
) -> list[float]:
    """Bytes on each rank of a layer's parameters, or of all that no layer has.

    In training each counts four times: with its gradient and two moments of an optimizer.
    """
    op = graph.layers.get(layer) if layer is not None else None
    held = (
        op.param_shards(splits.get(str(layer), REPLICATE), world)
        if op is not None
        else {}
    )
    found = [0.0] * world
    for name, size in graph.param_bytes.get(layer, {}).items():
        parts = (
            [box.numel / held[name].numel for box in held[name].boxes]
            if name in held
            else [1.0] * world
        )
        found = [
            of_rank + size * part for of_rank, part in zip(found, parts, strict=True)
        ]
    return [of_rank * (4 if mode == "train" else 1) for of_rank in found]


def input_bytes(graph: Graph) -> int:
    """Of the model's inputs, which every rank is given."""
    return sum(
        prod(graph.values[i].shape) * graph.values[i].itemsize for i in graph.inputs
    )


def last_readers(graph: Graph) -> list[int]:
    """By operator, the last one that reads its result or a view of it; one past all for
    what the model returns.
    """
    last: dict[int, int] = dict.fromkeys(graph.outputs, len(graph.nodes))
    for k in reversed(range(len(graph.nodes))):
        node = graph.nodes[k]
        for i in node.inputs:
            last.setdefault(i, k)
        for i in node.views:
            last[i] = max((last[i], *(last.get(out, k) for out in node.outputs)))
    return [
        max((last.get(i, k) for i in node.outputs), default=k)
        for k, node in enumerate(graph.nodes)
    ]


def live_bytes(results: Array, last: Sequence[int]) -> Array:
    """(operators, P) bytes: of all results, those that are there when each operator has run."""
    changes = np.zeros((len(results) + 2, *results.shape[1:]))
    changes[: len(last)] += results[: len(last)]
    np.subtract.at(changes, np.array(last, dtype=int) + 1, results[: len(last)])
    total: Array = changes.cumsum(0)[: len(results)]
    return total


def kept_results(graph: Graph, mode: Mode) -> set[Node]:
    """The operators whose results stay: in training all; in inference those that are
    there when most is.
    """
    if mode == "train" or not graph.nodes:
        return set(graph.nodes)
    last, sizes = (
        last_readers(graph),
        np.array([_whole_bytes(graph, node) for node in graph.nodes], dtype=float),
    )
    peak = int(live_bytes(sizes[:, None], last)[:, 0].argmax())
    return {node for k, node in enumerate(graph.nodes) if k <= peak <= last[k]}


def _whole_bytes(graph: Graph, node: Node) -> int:
    if not _leaves(node):
        return 0
    value = graph.values[node.outputs[0]]
    return prod(value.shape) * value.itemsize


def memory_bytes(
    graph: Graph,
    known: Sequence[MemoryUse],
    splits: Mapping[str, Split],
    world: int,
    mode: Mode,
    last: Sequence[int],
) -> tuple[int, ...]:
    """Bytes on each rank, at most: inputs, parameters, and what operators hold; in
    training all of it stays.

    ``known``: of every operator in order, then of what comes after them; ``last``: `last_readers`.
    """
    layers = (None, *graph.layers)
    held = np.sum(
        [parameter_bytes(graph, splits, world, mode, layer) for layer in layers], axis=0
    ) + input_bytes(graph)
    results, copies, passing = (
        np.array(column).reshape(-1, world) for column in zip(*known, strict=True)
    )
    if mode == "train":
        most = (results + copies).sum(0) + passing.max(0)
    else:
        most = (
            live_bytes(results, last) - results + copies + np.maximum(results, passing)
        ).max(0)
    return tuple(int(n) for n in (held + most).tolist())
