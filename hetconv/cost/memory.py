"""Peak bytes of a step in the memory of each device.

These are parameters, results of operators, and buffers for what arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hetconv.schemas.plan import Mode
from hetconv.sharding.layout import Boxes
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.rule import OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import Graph, Node

from .network import Array, Messages
from .propagate import Transfers
from .redistribution import MovedValue, received_bytes

# A parameter, its gradient, and two moments of an optimizer.
TENSORS_PER_TRAINED_PARAMETER = 4


class MemoryUse(NamedTuple):
    """Bytes of one operator under a plan, each of shape (P,).

    Attributes:
        result: Bytes of its result.
        receive_buffers: Bytes of tensors that are made of what arrives for it. They
            live until it is done, in training until its gradient is.
        transient: Most bytes that come and go during any of its passes.
    """

    result: Array
    receive_buffers: Array
    transient: Array


def result_bytes(graph: Graph, node: Node, sharding: OpSharding) -> list[int]:
    """Returns the bytes of an operator's result on each rank; views have none.

    Args:
        graph: Model.
        node: Operator.
        sharding: How it runs.
    """
    if not _allocates(node):
        return [0] * sharding.output.world
    itemsize = graph.values[node.outputs[0]].itemsize
    return [box.numel * itemsize for box in sharding.output.boxes]


def _allocates(node: Node) -> bool:
    return bool(node.outputs) and not node.views


def receive_buffer_bytes(
    transfers: Transfers, messages: Sequence[Messages], world: int, *, separate: bool
) -> Array:
    """Returns the bytes of the tensors that are made of what arrives, (P,).

    Args:
        transfers: Transfers of an operator.
        messages: Messages of all rounds of the transfers.
        world: Number of ranks.
        separate: Whether what arrives is not joined to a rank's own part; see
            `Network.messages`.
    """
    total, of_each_round = np.zeros(world), iter(messages)
    for rounds, itemsize in transfers:
        made = np.zeros(world)
        # The tensor of a round lives until that of the next round is made.
        for (_, wanted), of_round in zip(rounds, of_each_round, strict=False):
            made = of_round.sent_bytes.sum(0)
            if not separate:
                made = np.where(made > 0, _box_bytes(wanted, itemsize), 0.0)
        total = total + made
    return total


def peak_transient_bytes(messages: Sequence[Messages], world: int) -> Array:
    """Returns the most bytes that arrive in one round, (P,).

    Args:
        messages: Messages of each round.
        world: Number of ranks.
    """
    if not messages:
        return np.zeros(world)
    peak: Array = np.max([m.sent_bytes.sum(0) for m in messages], axis=0, initial=0.0)
    return peak


def receive_buffer_table(moved: MovedValue) -> Array:
    """Computes `receive_buffer_bytes` for all pairs of layouts of a value.

    Args:
        moved: Value, its layouts, and what is read of it.

    Returns:
        Bytes of shape (sources, reads, P).
    """
    arriving = received_bytes(moved)
    joined = np.array([_box_bytes(read.boxes, moved.itemsize) for read in moved.reads])
    if moved.separate is not None:
        joined = np.where(moved.separate[..., None], arriving, joined)
    made: Array = np.where(arriving > 0, joined, 0.0)
    return made


def _box_bytes(boxes: Boxes, itemsize: int) -> Array:
    return np.array([box.numel * itemsize for box in boxes], dtype=np.float64)


def parameter_bytes(
    graph: Graph, splits: Mapping[str, Split], world: int, mode: Mode, layer: str | None
) -> list[float]:
    """Returns the bytes of a layer's parameters on each rank.

    In training they include gradients and the state of an optimizer.

    Args:
        graph: Model.
        splits: Split of each layer.
        world: Number of ranks.
        mode: Whether a step trains.
        layer: Layer; None for all parameters that belong to no layer.
    """
    shards: Mapping[str, ParamShards] = {}
    if layer is not None and layer in graph.layers:
        split = splits.get(layer, REPLICATE)
        shards = graph.layers[layer].param_shards(split, world)
    total = [0.0] * world
    for name, size in graph.param_bytes.get(layer, {}).items():
        for rank in range(world):
            part = 1.0
            if name in shards:
                part = shards[name].boxes[rank].numel / shards[name].numel
            total[rank] += size * part
    copies = TENSORS_PER_TRAINED_PARAMETER if mode == "train" else 1
    return [size * copies for size in total]


def input_bytes(graph: Graph) -> int:
    """Returns the bytes of the model's inputs, which every rank is given."""
    values = [graph.values[i] for i in graph.inputs]
    return sum(prod(value.shape) * value.itemsize for value in values)


def last_readers(graph: Graph) -> list[int]:
    """Finds the last operator that reads the result of each one, or a view of it.

    Returns:
        Index of that operator, by operator; the number of operators where the model
        returns the result.
    """
    last: dict[int, int] = dict.fromkeys(graph.outputs, len(graph.nodes))
    for k, node in reversed([*enumerate(graph.nodes)]):
        for i in node.inputs:
            last.setdefault(i, k)
        for i in node.views:
            last[i] = max((last[i], *(last.get(out, k) for out in node.outputs)))
    return [
        max((last.get(i, k) for i in node.outputs), default=k)
        for k, node in enumerate(graph.nodes)
    ]


def live_bytes(results: Array, last: Sequence[int]) -> Array:
    """Sums the results that are alive when each operator has run.

    Args:
        results: Bytes of each result, of shape (operators, P).
        last: `last_readers`.

    Returns:
        Bytes of shape (operators, P).
    """
    changes = np.zeros((len(results) + 2, *results.shape[1:]))
    changes[: len(last)] += results[: len(last)]
    np.subtract.at(changes, np.array(last, dtype=int) + 1, results[: len(last)])
    total: Array = changes.cumsum(0)[: len(results)]
    return total


def kept_results(graph: Graph, mode: Mode) -> set[Node]:
    """Finds the operators whose results are alive at the peak.

    In training these are all operators.

    Args:
        graph: Model.
        mode: Whether a step trains.
    """
    if mode == "train" or not graph.nodes:
        return set(graph.nodes)
    last = last_readers(graph)
    sizes = [[_unsplit_bytes(graph, node)] for node in graph.nodes]
    peak = int(live_bytes(np.array(sizes, dtype=float), last)[:, 0].argmax())
    return {node for k, node in enumerate(graph.nodes) if k <= peak <= last[k]}


def _unsplit_bytes(graph: Graph, node: Node) -> int:
    if not _allocates(node):
        return 0
    value = graph.values[node.outputs[0]]
    return prod(value.shape) * value.itemsize


def memory_bytes(
    graph: Graph,
    uses: Sequence[MemoryUse],
    splits: Mapping[str, Split],
    world: int,
    mode: Mode,
    last: Sequence[int],
) -> tuple[int, ...]:
    """Returns the peak bytes on each rank.

    Args:
        graph: Model.
        uses: Memory of every operator in order, then of what comes after them.
        splits: Split of each layer.
        world: Number of ranks.
        mode: Whether a step trains; then all results stay.
        last: `last_readers`.
    """
    layers = (None, *graph.layers)
    parameters = [parameter_bytes(graph, splits, world, mode, name) for name in layers]
    constant = np.sum(parameters, axis=0) + input_bytes(graph)
    results, buffers, transient = (
        np.array(column).reshape(-1, world) for column in zip(*uses, strict=True)
    )
    if mode == "train":
        peak = (results + buffers).sum(0) + transient.max(0)
    else:
        live = live_bytes(results, last) - results
        peak = (live + buffers + np.maximum(results, transient)).max(0)
    return tuple(int(n) for n in (constant + peak).tolist())
