"""Base classes of operators, calls and their arguments, helpers of sharding rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.hierarchical import HierarchicalLayout, sharding_within_nodes
from hetconv.sharding.layout import Box, Layout, Layouts, ReadRegion, Shape, apportion
from hetconv.sharding.rule import Gather, Operator, OpSharding
from hetconv.sharding.split import REPLICATE, Split


class FollowingOperator:
    """An operator that follows its inputs; a plan does not split it.

    Attributes:
        shape: Shape of the output.
    """

    shape: Shape

    def sharding(self, inputs: Layouts, split: Split = REPLICATE) -> OpSharding:
        """Returns how the operator runs; see `Operator`."""
        return self._follow(inputs) or Gather(self.shape).sharding(inputs)

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        """Returns how the operator runs on shards, or None where it cannot."""
        raise NotImplementedError


class PerSampleOperator(FollowingOperator):
    """An operator whose rule knows layouts of one level.

    Under hierarchical layouts each node follows the rule with its own samples. Where
    that cannot be done, all inputs are gathered.
    """

    def sharding(self, inputs: Layouts, split: Split = REPLICATE) -> OpSharding:
        """Returns how the operator runs; see `Operator`."""
        if not any(isinstance(x, HierarchicalLayout) for x in inputs):
            return super().sharding(inputs)
        for lead, x in enumerate(inputs):
            found = self._led_by(inputs, lead) if x.kind != "replicated" else None
            if found is not None:
                return found
        return Gather(self.shape).sharding(inputs)

    def _has_samples(self, inputs: Layouts) -> Sequence[bool] | None:
        """Returns whether dimension 0 of each input is that of the output's samples.

        None where the operator does not compute each sample by itself.
        """
        return (True,) * len(inputs)

    def _led_by(self, inputs: Layouts, lead: int) -> OpSharding | None:
        """Returns the sharding that follows one input, with all other inputs replicated."""
        x = inputs[lead]
        if not isinstance(x, HierarchicalLayout):
            return self._follow_only(inputs, lead, x)
        has_samples = self._has_samples(inputs)
        if has_samples is None or not has_samples[lead]:
            return None
        if self.shape[:1] != x.shape[:1]:
            return None
        shardings = []
        for layout in x.node_layouts:
            sharding = self._follow_only(inputs, lead, layout)
            if sharding is None:
                return None
            shardings.append(sharding)
        reads = list(zip(*(s.input_layouts for s in shardings), strict=True))
        outputs = [s.output for s in shardings]
        combined = sharding_within_nodes(
            x.nodes, x.samples, reads, outputs, has_samples
        )
        if combined is None:
            return None
        partial_grads = any(s.partial_grads for s in shardings)
        return OpSharding(*combined, partial_grads=partial_grads)

    def _follow_only(self, inputs: Layouts, lead: int, x: Layout) -> OpSharding | None:
        """Follows input ``lead`` with the layout ``x``, all other inputs replicated."""
        layouts = [Layout.replicated(other.shape, x.world) for other in inputs]
        layouts[lead] = x
        sharding = self._follow(tuple(layouts))
        if sharding is None or sharding.output.kind == "replicated":
            return None
        return sharding


class WindowOperator(PerSampleOperator):
    """An operator whose outputs read ranges of the input along spatial dimensions."""

    def reads(self, dim: int, n: int, out: Span) -> Span:
        """Returns the inputs, of ``n`` along ``dim``, that the outputs ``out`` read."""
        raise NotImplementedError

    def _knows_reads(self, shape: Shape) -> bool:
        """Whether `reads` says what torch reads of an input of ``shape``."""
        return True

    def _follow(self, inputs: Layouts) -> OpSharding | None:
        x = reduce_scattered(inputs[0])
        dim = x.dim
        if dim is None or (dim > 1 and not self._knows_reads(x.shape)):
            return None
        if dim < 2:
            return OpSharding((x,), Layout.sharded(self.shape, dim, x.sizes))
        y = Layout.sharded(self.shape, dim, apportion(self.shape[dim], x.sizes))
        reads = [self.reads(dim, x.shape[dim], span_along(b, dim)) for b in y.boxes]
        return OpSharding((slab_reads(x.shape, dim, reads),), y)


def reduce_scattered(x: Layout) -> Layout:
    """Returns the layout in which operators on shards read a partial sum.

    It is scattered over channels in the proportions of its shares, or replicated if it
    has none. Any other layout is returned as it is.
    """
    if x.kind != "partial":
        return x
    if isinstance(x, HierarchicalLayout):
        layouts = [reduce_scattered(layout) for layout in x.node_layouts]
        if layouts[0].kind == "sharded":
            return HierarchicalLayout.from_nodes(x.nodes, x.samples, layouts)
    elif len(x.shape) > 1 and x.shares:
        return Layout.sharded(x.shape, 1, apportion(x.shape[1], x.shares))
    return Layout.replicated(x.shape, x.world)


def slab_reads(shape: Shape, dim: int, spans: Iterable[Span]) -> ReadRegion:
    """Returns the region in which each rank reads a range along one dimension.

    Args:
        shape: Shape of the tensor.
        dim: The dimension.
        spans: Range of each rank.
    """
    whole = Box.whole(shape)
    return ReadRegion(shape, tuple(whole.with_range(dim, lo, hi) for lo, hi in spans))


def span_along(box: Box, dim: int) -> Span:
    """Returns the range of a box in one dimension."""
    return box.lo[dim], box.hi[dim]


Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Reader = Callable[[str, Args, Kwargs], "Call | None"]
"""Reads a call from the function's bare name and arguments; None where no rule fits.

Calls that torch itself refuses are read as None too, so that torch raises its error.
"""

N_ARY = frozenset(
    """
    add addcdiv addcmul and atan2 bitwise_and bitwise_or bitwise_xor copysign div eq
    float_power floor_divide floordiv fmax fmin fmod ge gt hypot isclose le lerp
    logaddexp logical_and logical_or logical_xor lt masked_fill maximum minimum mod mul
    ne or pow rdiv remainder rfloordiv rpow rsub sub true_divide type_as where xlogy xor
    """.split()
)
WRITING_DUNDERS = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()
)
SYNONYMS = {"truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}


@dataclass(frozen=True)
class Call:
    """A call of a torch function, read as an operator.

    Attributes:
        op: The operator.
        inputs: The tensors that its rule reads, in order.
        in_place: Whether the call writes to the first one.
    """

    op: Operator
    inputs: tuple[Tensor, ...]
    in_place: bool = False

    @property
    def params(self) -> tuple[Tensor, ...]:
        """Parameters that ranks use for their own shards, besides the inputs."""
        return ()


@dataclass(frozen=True)
class WeightedCall(Call):
    """A call of an operator with a weight and a bias.

    Attributes:
        weight: The weight, if the call has one.
        bias: The bias, if the call has one.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def params(self) -> tuple[Tensor, ...]:
        """The weight and the bias, if given."""
        return tuple(p for p in (self.weight, self.bias) if p is not None)


@lru_cache(4096)
def function_name(func: Callable[..., Any]) -> str:
    """Returns the bare name of a torch function or method.

    It is "add" for add, add_, __add__, __iadd__ and __radd__ alike, but "rsub" for
    __rsub__, which is not symmetric. The getter of an attribute has its name, such as
    "mT".
    """
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    # These return one of Python's own numbers, unlike the methods bool, float and int.
    if name in ("__bool__", "__float__", "__int__"):
        return name
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in "ir" and bare[1:] in N_ARY | {"truediv"}:
        bare = bare[1:] if bare[0] == "i" or bare[1:] in ("add", "mul") else bare
    return SYNONYMS.get(bare, bare)


def writes_in_place(func: Callable[..., Any], kwargs: Kwargs) -> bool:
    """Whether a call writes to its first argument, by torch's naming."""
    return bool(kwargs.get("inplace")) or _writes_by_name(func)


@lru_cache(4096)
def _writes_by_name(func: Callable[..., Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return name in WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def arg(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    """Returns one argument of a call, given by position or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def bind(args: Args, kwargs: Kwargs, **defaults: Any) -> list[Any]:
    """Returns the first arguments of a call, given by position or by name.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        **defaults: Name and default of each parameter, in their order.
    """
    return [
        arg(args, kwargs, index, name, default)
        for index, (name, default) in enumerate(defaults.items())
    ]


def per_dim(value: Any, rank: int) -> tuple[int, ...]:
    """Returns an option as one number for each of ``rank`` spatial dimensions."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * rank if len(given) == 1 else given


def canonical_index(index: Any, count: int) -> int | None:
    """Returns an index, of ``count``, as a non-negative one; None if out of range."""
    return index % count if type(index) is int and -count <= index < count else None


def canonical_dims(dims: Any, rank: int) -> list[int] | None:
    """Returns one or several dimensions of ``rank`` as non-negative ones.

    None if one does not exist, or is given twice.
    """
    given = (dims,) if isinstance(dims, int) else dims
    if not isinstance(given, Sequence):
        return None
    found = [canonical_index(dim, rank) for dim in given]
    known = [dim for dim in found if dim is not None]
    return known if len(set(known)) == len(found) else None
