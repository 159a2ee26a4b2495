"""Bytes that are alive on each device while each operator of a step runs.

A result lives as long as the program refers to it, and in training until the backward
pass of the operators for which autograd saves it; see `hetconv.tracing.lifetimes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from hetconv.schemas.plan import Mode
from hetconv.sharding.split import Split
from hetconv.tracing.graph import Graph, Node
from hetconv.tracing.lifetimes import Lifetimes

from .memory import MemoryUse, input_bytes, parameter_bytes
from .network import Array

Indices = npt.NDArray[np.int64]

# A parameter and two moments of an optimizer; gradients come and go within a step.
TENSORS_PER_TRAINED_PARAMETER = 3


def lifetimes_of(graph: Graph, mode: Mode) -> Lifetimes:
    """Returns how long results live.

    Where it was not observed, a result lives until its last reader, and in training
    until its own backward pass.

    Args:
        graph: Model.
        mode: Whether a step trains.
    """
    count = len(graph.nodes)
    no_gradients = not any(graph.values[i].requires_grad for i in graph.outputs)
    if graph.lifetimes is not None and not (mode == "train" and no_gradients):
        return graph.lifetimes
    own = tuple(frozenset((k,)) for k in range(count))
    return Lifetimes(graph.last_readers, own, (0,) * count)


def kept_results(graph: Graph, mode: Mode) -> set[Node]:
    """Finds the operators whose results are alive at the peak.

    In training that is the begin of the backward pass.

    Args:
        graph: Model.
        mode: Whether a step trains.
    """
    if not graph.nodes:
        return set()
    lifetimes = lifetimes_of(graph, mode)
    last = np.array(lifetimes.last)
    if mode == "train":
        saved = set().union(*lifetimes.saves)
        at_end = [k for k in range(len(last)) if k in saved or last[k] == len(last)]
        return {graph.nodes[k] for k in at_end}
    sizes = np.array([[_unsplit_bytes(graph, node)] for node in graph.nodes])
    peak = int(alive_bytes(sizes, np.arange(len(last)), last)[:, 0].argmax())
    return {node for k, node in enumerate(graph.nodes) if k <= peak <= last[k]}


def _unsplit_bytes(graph: Graph, node: Node) -> float:
    if node.views or not node.outputs:
        return 0.0
    value = graph.values[node.outputs[0]]
    return float(prod(value.shape) * value.itemsize)


def alive_bytes(sizes: Array, first: Indices, last: Indices) -> Array:
    """Sums what is alive at each step.

    Args:
        sizes: Bytes, of shape (steps, P).
        first: First step at which each is alive, (steps,).
        last: Last step likewise.

    Returns:
        Bytes of shape (steps, P).
    """
    steps = len(sizes)
    changes = np.zeros((steps + 1, *sizes.shape[1:]))
    lives = np.flatnonzero(first <= last)
    np.add.at(changes, first[lives], sizes[lives])
    np.subtract.at(changes, np.minimum(last[lives] + 1, steps), sizes[lives])
    total: Array = changes.cumsum(0)[:steps]
    return total


def memory_bytes(
    graph: Graph,
    uses: Sequence[MemoryUse],
    splits: Mapping[str, Split],
    world: int,
    mode: Mode,
    bucket: Array,
) -> tuple[int, ...]:
    """Returns the peak bytes on each rank; see `memory_timeline`."""
    bytes_of_steps = memory_timeline(graph, uses, splits, world, mode, bucket)
    peak = bytes_of_steps.max(0)
    return tuple(int(n) for n in peak.tolist())


def memory_timeline(
    graph: Graph,
    uses: Sequence[MemoryUse],
    splits: Mapping[str, Split],
    world: int,
    mode: Mode,
    bucket: Array,
) -> Array:
    """Returns the bytes on each rank while each operator runs.

    Args:
        graph: Model.
        uses: Memory of every operator in order, then of what comes after them.
        splits: Split of each layer.
        world: Number of ranks.
        mode: Whether a step trains.
        bucket: Most bytes that are made to sum gradients among ranks, (P,).

    Returns:
        Bytes of shape (steps, P): of forward passes in order, and in training of
        backward passes from the last to the first.
    """
    layers = (None, *graph.layers)
    parameters = {
        name: np.array(parameter_bytes(graph, splits, world, name)) for name in layers
    }
    held = np.sum([*parameters.values()], axis=0) * held_copies(mode)
    constant = held + input_bytes(graph)
    lifetimes = lifetimes_of(graph, mode)
    steps = np.arange(len(uses))
    last = np.array([*lifetimes.last, *steps[len(graph.nodes) :]])
    if mode == "train" and graph.nodes:
        training = _Training(graph, uses, lifetimes, last)
        gradients = _parameter_gradients(graph, parameters, world)
        backward = training.backward(gradients, bucket)
        forward = training.forward()
        both: Array = constant + np.concatenate((forward, backward[::-1]))
        return both
    results, buffers, transient = _columns(uses)
    live = alive_bytes(results, steps, last) - results
    total: Array = constant + live + buffers + np.maximum(results, transient)
    return total


def _columns(uses: Sequence[MemoryUse]) -> tuple[Array, Array, Array]:
    """Returns (steps, P): bytes of results, of buffers, and of what comes and goes."""
    return (
        np.array([use.result for use in uses]),
        np.array([use.receive_buffers for use in uses]),
        np.array([use.transient for use in uses]),
    )


def held_copies(mode: Mode) -> int:
    """Returns how many tensors of a parameter's size stay between steps."""
    return TENSORS_PER_TRAINED_PARAMETER if mode == "train" else 1


class _Training:
    """Bytes of a step in training.

    Attributes:
        kept: (steps, P): bytes that autograd saves besides results, up to each node.
        first_saver: First node that needs a result in its backward pass, (steps,); the
            number of steps where none does.
    """

    def __init__(
        self,
        graph: Graph,
        uses: Sequence[MemoryUse],
        lifetimes: Lifetimes,
        last: Indices,
    ):
        self.graph, self.uses, self.last = graph, uses, last
        self.results, self.buffers, self.transient = _columns(uses)
        self.first_saver = np.full(len(uses), len(uses))
        kept = np.zeros_like(self.buffers)
        for k, (saves, use) in enumerate(zip(lifetimes.saves, uses, strict=False)):
            # A joined buffer is saved instead of the input that it holds.
            joined = use.joins and use.receive_buffers.any()
            for j in saves & {k} if joined else saves:
                self.first_saver[j] = min(self.first_saver[j], k)
            kept[k] = _share(graph, k, lifetimes.saved_bytes[k], use)
            kept[k] += use.receive_buffers * bool(saves)
        count = len(graph.nodes)
        kept[count:] = self.buffers[count:]  # the model's result, gathered
        self.kept = kept.cumsum(0)

    def forward(self) -> Array:
        """Returns (steps, P): bytes while operators run forward."""
        steps, end = np.arange(len(self.results)), len(self.results)
        last = np.where(self.first_saver < end, end, self.last)
        live = alive_bytes(self.results, steps, last) - self.results
        passing = np.maximum(self.results, self.transient)
        total: Array = live + self.kept + passing
        return total

    def backward(self, parameter_gradients: Array, bucket: Array) -> Array:
        """Returns (nodes, P): bytes while the gradient of each node is computed.

        Args:
            parameter_gradients: (nodes, P): bytes that each gradient adds for good.
            bucket: As for `memory_timeline`.
        """
        count, end = len(self.graph.nodes), len(self.results)
        outlives = (self.first_saver == end) & (self.last >= count)
        first = np.where(outlives, 0, self.first_saver)
        saved = alive_bytes(self.results, first, np.full(end, end))
        of_parameters = parameter_gradients[::-1].cumsum(0)[::-1]
        held = saved[:count] + self.kept[:count] + self.buffers[count:].sum(0)
        passing = self.transient[:count] + np.minimum(bucket, of_parameters)
        total: Array = held + self._gradients() + of_parameters + passing
        return total

    def _gradients(self) -> Array:
        """Returns (nodes, P): bytes of the gradients of results.

        Each is there from the backward pass of the last reader to that of its own node.
        """
        nodes, values = self.graph.nodes, self.graph.values
        count = len(nodes)
        made = [
            use.output
            * any(values[i].requires_grad for i in node.outputs)
            * (node.writes or not node.views)
            for node, use in zip(nodes, self.uses, strict=False)
        ]
        readers = np.minimum(np.array(self.graph.last_readers), count - 1)
        return alive_bytes(np.array(made), np.arange(count), readers)


def _share(graph: Graph, k: int, saved_bytes: int, use: MemoryUse) -> Array:
    """Returns each rank's part, (P,), of what a node saves besides results."""
    node = graph.nodes[k]
    if not saved_bytes or not node.outputs:
        return np.zeros_like(use.output)
    value = graph.values[node.outputs[0]]
    whole = prod(value.shape) * value.itemsize
    return saved_bytes * use.output / max(whole, 1)


def _parameter_gradients(
    graph: Graph, parameters: Mapping[str | None, Array], world: int
) -> Array:
    """Returns (nodes, P): bytes of the gradients that each backward pass makes first.

    Args:
        graph: Model.
        parameters: Bytes of each layer's parameters, (P,).
        world: Number of ranks.
    """
    made = np.zeros((len(graph.nodes), world))
    seen: set[str | int] = set()
    for k in reversed(range(len(graph.nodes))):
        node = graph.nodes[k]
        trained = [i for i in node.params if graph.values[i].requires_grad]
        if node.layer in graph.layers:
            if trained and node.layer not in seen:
                made[k] += parameters[node.layer]
                seen.add(node.layer)
            continue
        for i in trained:
            if i not in seen:
                value = graph.values[i]
                made[k] += prod(value.shape) * value.itemsize
                seen.add(i)
    return made
