"""What the rules of operators that follow their inputs have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

from torch import Tensor

from hetconv.sharding.conv_spec import Span
from hetconv.sharding.hierarchical import HierarchicalLayout, sharding_within_nodes
from hetconv.sharding.layer_rules import REPLICATE, Gather, Operator, OpSharding, Split
from hetconv.sharding.layout import Box, Layout, ReadRegion, Shape, apportion

Rule = Callable[..., OpSharding]  # of (operator, inputs, split)
Counted = Callable[[Any, tuple[Layout, ...]], Sequence[bool] | None]


def every_input(op: Any, inputs: tuple[Layout, ...]) -> Sequence[bool] | None:
    return (True,) * len(inputs)


def inputs_unless(what: Callable[[Any], bool]) -> Counted:
    """Every input, but for operators of which this is true."""
    return lambda op, inputs: None if what(op) else every_input(op, inputs)


def per_sample(counted: Counted = every_input) -> Callable[[Rule], Rule]:
    """Makes a rule of one level a rule of two: each node follows it with its own
    samples, or all gather.

    ``counted`` says of each input whether its dimension 0 counts the samples that
    dimension 0 of the result counts, if each of these is computed by itself; else None.
    """

    def lifted(rule: Rule) -> Rule:
        @wraps(rule)
        def step(
            op: Any, inputs: tuple[Layout, ...], split: Split = REPLICATE
        ) -> OpSharding:
            if not any(isinstance(x, HierarchicalLayout) for x in inputs):
                return rule(op, inputs, split)
            ways = (
                _led(op, rule, counted, inputs, k)
                for k, x in enumerate(inputs)
                if x.kind != "replicated"
            )
            return next((way for way in ways if way is not None), None) or Gather(
                op.shape
            ).sharding(inputs)

        return step

    return lifted


def _led(
    op: Any, rule: Rule, counted: Counted, inputs: tuple[Layout, ...], lead: int
) -> OpSharding | None:
    """The step if input ``lead`` says how to run; None if it does not."""

    def follow(x: Layout) -> OpSharding:
        others = [Layout.replicated(other.shape, x.world) for other in inputs]
        return rule(op, (*others[:lead], x, *others[lead + 1 :]), REPLICATE)

    x = inputs[lead]
    if not isinstance(x, HierarchicalLayout):
        step = follow(x)
        return step if step.output.kind != "replicated" else None
    of_samples = counted(op, inputs)
    if of_samples is None or not of_samples[lead] or op.shape[:1] != x.shape[:1]:
        return None
    once = {part: follow(part) for part in dict.fromkeys(x.parts)}
    steps = [once[part] for part in x.parts]
    if any(
        step.forward_moves or step.backward_moves or step.shared_stats for step in steps
    ):
        return None
    reads = list(zip(*(step.input_layouts for step in steps), strict=True))
    found = sharding_within_nodes(
        x.nodes, x.samples, reads, [step.output for step in steps], of_samples
    )
    return (
        OpSharding(*found, partial_grads=any(step.partial_grads for step in steps))
        if found is not None
        else None
    )


def reduce_scattered(x: Layout) -> Layout:
    """A partial sum as its consumers on parts want it: scattered over channels in the
    proportions of its shares.

    Whole, if it has none.
    """
    if isinstance(x, HierarchicalLayout) and x.kind == "partial":
        parts = [reduce_scattered(part) for part in x.parts]
        scattered = parts[0].kind == "sharded"
        return (
            HierarchicalLayout.of(x.nodes, x.samples, parts)
            if scattered
            else Layout.replicated(x.shape, x.world)
        )
    if x.kind != "partial":
        return x
    if len(x.shape) < 2 or not x.shares:
        return Layout.replicated(x.shape, x.world)
    return Layout.sharded(x.shape, 1, apportion(x.shape[1], x.shares))


def resharded(x: Layout, shape: Shape, dim: int, sizes: Sequence[int]) -> Layout:
    """The layout of an output of ``shape`` that is cut along ``dim`` as ``x`` is cut
    along its own dimension.
    """
    return (
        Layout.sharded(shape, dim, sizes)
        if x.kind == "sharded"
        else Layout.replicated(shape, x.world)
    )


def sharded_dims(x: Layout) -> set[int]:
    """The dimensions that some rank does not hold whole."""
    return {
        d
        for d, n in enumerate(x.shape)
        if any((b.lo[d], b.hi[d]) != (0, n) for b in x.boxes)
    }


def slab_reads(shape: Shape, dim: int, spans: Iterable[Span]) -> ReadRegion:
    """A range along ``dim`` for each rank, and everything of all other dimensions."""
    return ReadRegion(
        shape, tuple(Box.whole(shape).along(dim, lo, hi) for lo, hi in spans)
    )


Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Reader = Callable[[str, Args, Kwargs], "Call | None"]

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
    for name in (
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
    )
)


@dataclass(frozen=True)
class Call:
    """An operator and the tensors that its rule reads, in order. ``in_place``: the
    first one is written to.
    """

    op: Operator
    inputs: tuple[Tensor, ...]
    in_place: bool = False

    @property
    def params(self) -> tuple[Tensor, ...]:
        """Parameters that are used on own parts, besides the inputs."""
        return ()


@lru_cache(4096)
def name_of(func: Callable[..., Any]) -> str:
    """add for add, add_, __add__, __iadd__ and __radd__ alike; rsub for __rsub__, for
    it is not symmetric.
    """
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # of an attribute: mT, T
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    if name in ("__bool__", "__float__", "__int__"):  # of one number, into Python's own
        return name
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in "ir" and bare[1:] in N_ARY | {"truediv"}:
        bare = bare[1:] if bare[0] == "i" or bare[1:] in ("add", "mul") else bare
    return {
        "truediv": "div",
        "divide": "div",
        "multiply": "mul",
        "subtract": "sub",
    }.get(bare, bare)


def writes_in_place(func: Callable[..., Any], kwargs: Kwargs) -> bool:
    """Whether a call writes to its first argument, by torch's naming."""
    return bool(kwargs.get("inplace")) or _writes_by_name(func)


@lru_cache(4096)
def _writes_by_name(func: Callable[..., Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return name in WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def arg(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def per_dim(value: Any, rank: int) -> tuple[int, ...]:
    """An option of an operator as a number for each of its ``rank`` spatial dimensions."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * rank if len(given) == 1 else given


def dim_of(dim: Any, rank: int) -> int | None:
    """A dimension of ``rank``, counted from the front; None if there is none such."""
    return dim % rank if type(dim) is int and -rank <= dim < rank else None


def dims_of(dims: Any, rank: int) -> list[int] | None:
    """One or several dimensions, counted from the front; None if one is not there, or twice."""
    listed = (dims,) if isinstance(dims, int) else dims
    found = (
        [dim_of(d, rank) for d in listed] if isinstance(listed, Sequence) else [None]
    )
    return (
        [d for d in found if d is not None]
        if None not in found and len(set(found)) == len(found)
        else None
    )
