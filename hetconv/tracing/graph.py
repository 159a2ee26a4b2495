"""The graph of a model: its operators and their shapes, as one run recorded them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from hetconv.operators import VIEWS
from hetconv.operators.shapes import Reshape
from hetconv.sharding.layer_rules import Conv, Linear
from hetconv.sharding.layout import Layout, Shape
from hetconv.sharding.rule import Operator

from .lifetimes import Lifetimes


@dataclass(frozen=True)
class Value:
    """A tensor.

    Attributes:
        shape: Its shape.
        dtype: torch's name of its data type, such as "float32".
        itemsize: Bytes of an element.
        requires_grad: Whether backward computes its gradient.
        param: Its name, if it is a parameter of the model.
    """

    shape: Shape
    dtype: str
    itemsize: int
    requires_grad: bool
    param: str | None = None


@dataclass(frozen=True)
class Node:
    """One call of an operator; tensors are given as indices into `Graph.values`.

    Attributes:
        name: The layer, or a name that is unique in the graph.
        op: The operator.
        inputs: What its sharding rule reads.
        outputs: Its results.
        params: Parameters that it uses besides the inputs.
        layer: Name of the module that a plan can split.
        views: Tensors whose memory the results share.
        function: Bare name of the torch function.
        writes: Whether it writes to its first input.
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
    """The operators of a model in the order of their calls.

    Attributes:
        model: Name of the model's class.
        inputs: Tensors with which the model was called, as indices into ``values``.
        outputs: Tensors that it returned.
        params: All parameters of the model, in its order.
        values: All tensors.
        nodes: All operators.
        lifetimes: How long results stay in memory, if that was observed.
    """

    model: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    lifetimes: Lifetimes | None = None

    @cached_property
    def layers(self) -> dict[str, Conv | Linear]:
        """The operators that a plan can split, by module name.

        A module that runs several times counts with its first run.
        """
        found: dict[str, Conv | Linear] = {}
        for node in self.nodes:
            if node.layer is not None and isinstance(node.op, Conv | Linear):
                found.setdefault(node.layer, node.op)
        return found

    @cached_property
    def param_bytes(self) -> dict[str | None, dict[str, int]]:
        """Bytes of each layer's parameters, by their names in the layer.

        Parameters that belong to no layer are under None, by their whole names.
        """
        found: dict[str | None, dict[str, int]] = {}
        for i in self.params:
            value = self.values[i]
            full_name = str(value.param)
            layer, _, name = full_name.rpartition(".")
            size = prod(value.shape) * value.itemsize
            if layer in self.layers:
                found.setdefault(layer, {})[name] = size
            else:
                found.setdefault(None, {})[full_name] = size
        return found

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Nodes that read each value; the model's result is one more node."""
        found: dict[int, list[int]] = {}
        for k, node in enumerate(self.nodes):
            for i in node.inputs:
                found.setdefault(i, []).append(k)
        for i in self.outputs:
            found.setdefault(i, []).append(len(self.nodes))
        return found

    @cached_property
    def last_readers(self) -> tuple[int, ...]:
        """The last node that reads the result of each one, or a view of it.

        It is the number of nodes where the model returns the result.
        """
        last: dict[int, int] = dict.fromkeys(self.outputs, len(self.nodes))
        for k, node in reversed([*enumerate(self.nodes)]):
            for i in node.inputs:
                last.setdefault(i, k)
            for i in node.views:
                last[i] = max((last[i], *(last.get(out, k) for out in node.outputs)))
        return tuple(
            max((last.get(i, k) for i in node.outputs), default=k)
            for k, node in enumerate(self.nodes)
        )

    @cached_property
    def extra_gradients(self) -> dict[int, int]:
        """How many gradients backward adds to the first one, by value.

        Only values that several operators read have any.
        """
        readers = Counter(self.outputs)
        for node in self.nodes:
            if any(self.values[i].requires_grad for i in node.outputs):
                readers.update(node.inputs)
        return {
            i: count - 1
            for i, count in readers.items()
            if count > 1 and self.values[i].requires_grad
        }

    @cached_property
    def input_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the inputs."""
        return tuple(self.values[i].shape for i in self.inputs)

    @cached_property
    def digest(self) -> str:
        """Hash of the operators and their shapes, to which tuned results belong."""
        text = "\n".join(f"{n.op} {n.inputs} {n.layer}" for n in self.nodes)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class AliasGroups:
    """Which sharded values share memory, as `hetconv.ops.views` tracks it.

    A group is a value and the views of it.

    Attributes:
        layouts: Layout of each value; `replicate` changes it.
        groups: The group of each value that has one; its first value is the root, of
            which the others are views.
        copies: Roots of which a view may be a copy.
    """

    def __init__(self, layouts: dict[int, Layout]):
        self.layouts = layouts
        self.groups: dict[int, list[int]] = {}
        self.copies: set[int] = set()

    def add(self, node: Node) -> None:
        """Adds the results of a node to the group of its input, if they share memory.

        The result of a call in place is the same tensor as its input.
        """
        in_place = node.writes and any(i in self.groups for i in node.views)
        if not isinstance(node.op, VIEWS) and not in_place:
            return
        source = node.inputs[0]
        group = self.groups.setdefault(source, [source])
        group += node.outputs
        self.groups |= dict.fromkeys(node.outputs, group)
        if isinstance(node.op, Reshape):
            self.copies.add(group[0])

    def may_write(self, node: Node, output: Layout) -> bool:
        """Whether a call in place runs on shards; see `hetconv.ops.views.may_write`.

        Args:
            node: The call.
            output: Layout of its result.
        """
        if output.kind == "replicated" or not node.views:
            return False
        target = node.views[0]
        if self.layouts[target].kind == "replicated":
            return False
        group = self.groups.get(target)
        if group is None:
            return True
        return group[0] not in self.copies and output == self.layouts[target]

    def replicate(self, values: Sequence[int]) -> list[tuple[int, Layout]]:
        """Replicates values and everything that shares memory with them.

        Args:
            values: The values.

        Returns:
            The roots that are gathered, with the layouts that they had.
        """
        gathered: list[tuple[int, Layout]] = []
        for i in values:
            group = self.groups.get(i, [])
            gathered += [(root, self.layouts[root]) for root in group[:1]]
            for j in group:
                layout = self.layouts[j]
                self.layouts[j] = Layout.replicated(layout.shape, layout.world)
                del self.groups[j]
        return gathered
