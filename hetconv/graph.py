"""Graph: the operators of a model with their shapes, as one run of it recorded them. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from .layout import Shape
from .rules import Conv, Linear, Op


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

    ``layer``: the module that a plan names. ``views``: inputs whose memory the output shares. ``function``: what was
    called, by its bare name.
    """

    name: str
    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...] = ()
    layer: str | None = None
    views: tuple[int, ...] = ()
    function: str = ""


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
        """The operators that a plan names, by module name; of a module that runs twice, the first run."""
        found: dict[str, Conv | Linear] = {}
        for node in self.nodes:
            if node.layer is not None and isinstance(node.op, Conv | Linear):
                found.setdefault(node.layer, node.op)
        return found

    @cached_property
    def input_shapes(self) -> tuple[Shape, ...]:
        return tuple(self.values[i].shape for i in self.inputs)

    @cached_property
    def digest(self) -> str:
        """Of operators and shapes: what a tuned ratio belongs to."""
        said = "\n".join(f"{n.op} {n.inputs} {n.layer}" for n in self.nodes)
        return hashlib.sha256(said.encode()).hexdigest()[:16]
