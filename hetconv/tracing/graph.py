"""Graph: the operators of a model with their shapes, as one run of it recorded them. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from hetconv.operators import VIEWS
from hetconv.operators.shapes import Reshape
from hetconv.sharding.layer_rules import Conv, Linear, Operator
from hetconv.sharding.layout import Layout, Shape


@dataclass(frozen=True)
class Value:
    """A tensor. ``param`` is its name where it is a parameter of the model."""

    shape: Shape
    dtype: str
    itemsize: int
    requires_grad: bool
    param: str | None = None


@dataclass(frozen=True)
class Node:
    """One operator. ``inputs`` are what its rule reads, ``params`` further parameters.

    ``layer``: the module that a plan names. ``views``: inputs whose memory the output
    shares. ``function``: what was called, by its bare name. ``writes``: it was called
    in place.
    """

    name: str
    op: Operator
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...] = ()
    layer: str | None = None
    views: tuple[int, ...] = ()
    function: str = ""
    writes: bool = False


@dataclass(frozen=True)
class Graph:
    """``params`` are all parameters of the model, in its order, as indices of ``values``."""

    model: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def layers(self) -> dict[str, Conv | Linear]:
        """The operators that a plan names, by module name; of a module that runs twice,
        the first run.
        """
        found: dict[str, Conv | Linear] = {}
        for node in self.nodes:
            if node.layer is not None and isinstance(node.op, Conv | Linear):
                found.setdefault(node.layer, node.op)
        return found

    @cached_property
    def owned(self) -> dict[str | None, dict[str, int]]:
        """Bytes of each layer's parameters, by their names in it; of None those that no
        layer has.
        """
        found: dict[str | None, dict[str, int]] = {}
        for i in self.params:
            value = self.values[i]
            layer, _, name = str(value.param).rpartition(".")
            owner, name = (
                (layer, name) if layer in self.layers else (None, str(value.param))
            )
            found.setdefault(owner, {})[name] = prod(value.shape) * value.itemsize
        return found

    @cached_property
    def forks(self) -> dict[int, int]:
        """By value that several operators read: how often backward adds a further
        gradient of it to those before.
        """
        readers = Counter(self.outputs)
        for node in self.nodes:
            if any(self.values[i].requires_grad for i in node.outputs):
                readers.update(node.inputs)
        return {
            i: n - 1
            for i, n in readers.items()
            if n > 1 and self.values[i].requires_grad
        }

    @cached_property
    def input_shapes(self) -> tuple[Shape, ...]:
        return tuple(self.values[i].shape for i in self.inputs)

    @cached_property
    def digest(self) -> str:
        """Of operators and shapes: what a tuned ratio belongs to."""
        said = "\n".join(f"{n.op} {n.inputs} {n.layer}" for n in self.nodes)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


class Memory:
    """Which values share memory on parts, as `ops.views` keeps it: families, each of a
    first value and views of it.
    """

    def __init__(self, placed: dict[int, Layout]):
        self.placed = placed
        self.family: dict[int, list[int]] = {}
        self.copies: set[int] = set()

    def join(self, node: Node) -> None:
        """A view joins the family of what it is taken of; what is written to in place
        is the same tensor after it.
        """
        if isinstance(node.op, VIEWS) or (
            node.writes and any(i in self.family for i in node.views)
        ):
            source = node.inputs[0]
            family = self.family.setdefault(source, [source])
            family += node.outputs
            self.family |= dict.fromkeys(node.outputs, family)
            if isinstance(node.op, Reshape):
                self.copies.add(family[0])

    def may_write(self, node: Node, output: Layout) -> bool:
        """Whether a call in place runs on parts, see `ops.views.may_write`."""
        if (
            output.kind == "replicated"
            or not node.views
            or self.placed[node.views[0]].kind == "replicated"
        ):
            return False
        family = self.family.get(node.views[0])
        return family is None or (
            family[0] not in self.copies and output == self.placed[node.views[0]]
        )

    def make_whole(self, values: Sequence[int]) -> list[tuple[int, Layout]]:
        """Replicates the families of ``values``: their first values, which are
        gathered, and how each lay.
        """
        gathered: list[tuple[int, Layout]] = []
        for i in values:
            family = self.family.get(i, [])
            gathered += [(root, self.placed[root]) for root in family[:1]]
            for j in family:
                self.placed[j] = Layout.replicated(
                    self.placed[j].shape, self.placed[j].world
                )
                del self.family[j]
        return gathered
