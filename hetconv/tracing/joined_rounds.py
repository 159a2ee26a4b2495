"""Rounds of messages that two operators share: moments of a norm and halos of a convolution.

The runtime defers a norm whose moments are exchanged; see `hetconv.ops.norms.deferred_norm`.
"""

from __future__ import annotations

from dataclasses import replace

from hetconv.operators.elementwise import ZERO_AT_ZERO
from hetconv.operators.norms import GroupNorm
from hetconv.sharding.conv_spec import Ints
from hetconv.sharding.layer_rules import Conv

from .graph import Graph, Node


def with_joined_rounds(graph: Graph) -> Graph:
    """Returns the graph with the dimensions noted along which norms share rounds.

    A norm shares the round of a convolution that alone reads its result, or an
    elementwise function of it.

    Args:
        graph: Graph as it was recorded.
    """
    nodes = tuple(
        replace(node, op=replace(node.op, joined_dims=_halo_dims(graph, node)))
        if isinstance(node.op, GroupNorm)
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _halo_dims(graph: Graph, node: Node) -> Ints:
    """Returns the dimensions along which the convolution after a norm reads halos."""
    while True:
        result = node.outputs[0]
        reading = graph.readers.get(result, [])
        if len(reading) != 1 or reading[0] == len(graph.nodes):
            return ()
        node = graph.nodes[reading[0]]
        if isinstance(node.op, Conv):
            windows = enumerate(node.op.spec.windows, 2)
            return tuple(
                d for d, w in windows if w.dilation * (w.kernel - 1) >= w.stride
            )
        if node.function not in ZERO_AT_ZERO or len(node.outputs) != 1:
            return ()
