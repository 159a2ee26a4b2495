"""Epilogue fusion: which operators a convolution's kernel can compute on its result."""

from __future__ import annotations

from itertools import takewhile

from hetconv.operators.elementwise import ACTIVATIONS, Pointwise
from hetconv.operators.norms import BatchNorm
from hetconv.sharding.layer_rules import Conv

from .graph import Graph, Node

Fusible = tuple[str, ...]
"""Names of functions, in the order of their calls."""


def fusible_functions(graph: Graph) -> dict[str, Fusible]:
    """Returns the functions that can be fused into each convolution.

    These are a batch norm, an addition and an activation, in this order; each may be
    missing. Each must be the only reader of the result before it. A layer that runs
    several times has what all its runs have in common.

    Returns:
        The functions by layer name, without layers that have none.
    """
    found: dict[str, Fusible] = {}
    for i, node in enumerate(graph.nodes):
        if node.layer is not None and isinstance(node.op, Conv):
            chain = _chain(graph, i)
            found[node.layer] = _common_prefix(found.get(node.layer, chain), chain)
    return {layer: chain for layer, chain in found.items() if chain}


def _chain(graph: Graph, conv: int) -> Fusible:
    """Returns the functions that can be fused into the convolution of one node."""
    chain: Fusible = ()
    last, conv_input = conv, graph.nodes[conv].inputs[0]
    while True:
        result = graph.nodes[last].outputs[0]
        reading = graph.readers.get(result, [])
        if len(reading) != 1 or reading[0] == len(graph.nodes):
            return chain
        reader = graph.nodes[reading[0]]
        between = graph.nodes[last + 1 : reading[0]]
        # The convolution is deferred: a node between that aliases its input may write to it.
        if any(conv_input in node.views for node in between):
            return chain
        if not _can_follow(graph, reader, chain):
            return chain
        chain, last = (*chain, reader.function), reading[0]


def _can_follow(graph: Graph, node: Node, chain: Fusible) -> bool:
    """Whether a node can be fused after the functions of ``chain``."""
    if len(node.outputs) != 1 or any(name in ACTIVATIONS for name in chain):
        return False
    if isinstance(node.op, BatchNorm):
        return not chain
    if not isinstance(node.op, Pointwise):
        return False
    if node.function == "add":
        shapes = {graph.values[i].shape for i in node.inputs}
        return "add" not in chain and len(node.inputs) == 2 and len(shapes) == 1
    return node.function in ACTIVATIONS


def _common_prefix(a: Fusible, b: Fusible) -> Fusible:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(name for name, _ in pairs)
