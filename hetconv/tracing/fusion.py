"""Which functions may be computed as a convolution's result is stored: a norm, an
addition, an activation. Pure.
"""

from __future__ import annotations

from hetconv.operators.elementwise import ACTIVATIONS, Pointwise
from hetconv.operators.norms import BatchNorm
from hetconv.sharding.layer_rules import Conv

from .graph import Graph, Node

Fusible = tuple[str, ...]


def fusible_functions(graph: Graph) -> dict[str, Fusible]:
    """By layer, the functions in order that alone consume a convolution: batch_norm,
    then add, then an activation.

    Each may be missing; layers without any are left out. A layer that runs more than
    once has what all runs have.
    """
    readers = _readers(graph)
    found: dict[str, Fusible] = {}
    for i, node in enumerate(graph.nodes):
        if node.layer is not None and isinstance(node.op, Conv):
            chain = _chain(graph, readers, i)
            found[node.layer] = _common(found.get(node.layer, chain), chain)
    return {layer: chain for layer, chain in found.items() if chain}


def _readers(graph: Graph) -> dict[int, list[int]]:
    """The nodes that read each value; the model's output counts as one more."""
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for value in node.inputs:
            readers.setdefault(value, []).append(i)
    for value in graph.outputs:
        readers.setdefault(value, []).append(len(graph.nodes))
    return readers


def _chain(graph: Graph, readers: dict[int, list[int]], start: int) -> Fusible:
    chain: Fusible = ()
    at, source = start, graph.nodes[start].inputs[0]
    while True:
        node = graph.nodes[at]
        reading = readers.get(node.outputs[0], [])
        if len(reading) != 1 or reading[0] == len(graph.nodes):
            return chain
        following = graph.nodes[reading[0]]
        between = graph.nodes[at + 1 : reading[0]]
        if any(source in n.views for n in between) or not _follows(
            graph, following, chain
        ):
            return chain
        chain, at = (*chain, following.function), reading[0]


def _follows(graph: Graph, node: Node, chain: Fusible) -> bool:
    """Whether a node can be folded after ``chain``."""
    if len(node.outputs) != 1 or any(f in ACTIVATIONS for f in chain):
        return False
    if isinstance(node.op, BatchNorm):
        return not chain
    if not isinstance(node.op, Pointwise):
        return False
    if node.function == "add":
        shapes = {graph.values[i].shape for i in node.inputs}
        return "add" not in chain and len(node.inputs) == 2 and len(shapes) == 1
    return node.function in ACTIVATIONS


def _common(a: Fusible, b: Fusible) -> Fusible:
    """The longest beginning of both."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]
