"""Bytes of operators, parameters and buffers for what arrives; see `memory_timeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hetconv.operators.conv_transpose import ConvTranspose
from hetconv.sharding.layer_rules import Conv
from hetconv.sharding.layout import Boxes
from hetconv.sharding.param_shards import ParamShards
from hetconv.sharding.rule import Operator, OpSharding
from hetconv.sharding.split import REPLICATE, Split
from hetconv.tracing.graph import Graph, Node

from .network import Array, Messages
from .propagate import Transfers
from .redistribution import MovedValue, received_bytes


class MemoryUse(NamedTuple):
    """Bytes of one operator under a plan, each of shape (P,).

    Attributes:
        result: Bytes that its result adds: none if that shares memory with an input.
        output: Bytes of its result in any case, and of the gradient of that.
        receive_buffers: Bytes of tensors that are made of what arrives for it. They
            live until it is done, in training until its gradient is.
        transient: Most bytes that come and go during any of its passes.
        joins: Whether the buffers hold a rank's own part too, so that backward reads
            them instead of inputs.
    """

    result: Array
    output: Array
    receive_buffers: Array
    transient: Array
    joins: bool


def output_bytes(graph: Graph, node: Node, sharding: OpSharding) -> list[int]:
    """Returns the bytes of an operator's output on each rank.

    Args:
        graph: Model.
        node: Operator.
        sharding: How it runs.
    """
    if not node.outputs:
        return [0] * sharding.output.world
    itemsize = graph.values[node.outputs[0]].itemsize
    return [box.numel * itemsize for box in sharding.output.boxes]


def result_bytes(graph: Graph, node: Node, sharding: OpSharding) -> list[int]:
    """Returns the bytes that an operator's result adds on each rank; views add none.

    Args:
        graph: Model.
        node: Operator.
        sharding: How it runs.
    """
    if node.views:
        return [0] * sharding.output.world
    return output_bytes(graph, node, sharding)


def workspace_bytes(
    op: Operator, split: Split, sharding: OpSharding, itemsize: int
) -> Array:
    """Returns the bytes that a convolution on a CPU takes beside its result, (P,).

    oneDNN orders the filters anew for every call. PyTorch unfolds volumes of a single
    sample, and all that a transposed convolution of volumes computes.

    Args:
        op: Operator; others than convolutions take nothing.
        split: Its split.
        sharding: How it runs.
        itemsize: Bytes of an element.
    """
    outputs, numels = sharding.output.boxes, []
    if isinstance(op, Conv):
        filters = op.param_shards(split, len(outputs))["weight"].boxes
        for box, out in zip(filters, outputs, strict=True):
            unfolds = len(out.shape) == 5 and out.shape[0] == 1
            columns = prod(out.shape[2:]) * box.numel // max(box.shape[0], 1)
            numels.append(columns if unfolds else box.numel * (out.numel > 0))
    elif isinstance(op, ConvTranspose) and len(op.windows) == 3:
        taps = prod(window.kernel for window in op.windows)
        for box in sharding.input_layouts[0].boxes:
            columns = op.shape[1] // op.groups * taps
            numels.append(columns * prod(box.shape[2:]))
    else:
        return np.zeros(len(outputs))
    return itemsize * np.array(numels, dtype=np.float64)


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
    graph: Graph, splits: Mapping[str, Split], world: int, layer: str | None
) -> list[float]:
    """Returns the bytes of a layer's parameters on each rank.

    Args:
        graph: Model.
        splits: Split of each layer.
        world: Number of ranks.
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
    return total


def input_bytes(graph: Graph) -> int:
    """Returns the bytes of the model's inputs, which every rank is given."""
    values = [graph.values[i] for i in graph.inputs]
    return sum(prod(value.shape) * value.itemsize for value in values)
