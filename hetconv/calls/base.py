"""What a call of a torch function is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from hetconv.sharding.layer_rules import Op

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Reader = Callable[[str, Args, Kwargs], "Call | None"]

JOINS = frozenset(
    """
    add addcdiv addcmul and atan2 bitwise_and bitwise_or bitwise_xor copysign div eq float_power floor_divide floordiv
    fmax fmin fmod ge gt hypot isclose le lerp logaddexp logical_and logical_or logical_xor lt masked_fill maximum
    minimum mod mul ne or pow rdiv remainder rfloordiv rpow rsub sub true_divide type_as where xlogy xor
    """.split()
)
WRITING_DUNDERS = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)


@dataclass(frozen=True)
class Call:
    """An operator and the tensors that its rule reads, in order. ``in_place``: the first one is written to."""

    op: Op
    inputs: tuple[Tensor, ...]
    in_place: bool = False

    @property
    def params(self) -> tuple[Tensor, ...]:
        """Parameters that are used on own parts, besides the inputs."""
        return ()


@lru_cache(4096)
def name_of(func: Callable[..., Any]) -> str:
    """add for add, add_, __add__, __iadd__ and __radd__ alike; rsub for __rsub__, for it is not symmetric."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # of an attribute: mT, T
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    if name in ("__bool__", "__float__", "__int__"):  # of one number, into Python's own
        return name
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in "ir" and bare[1:] in JOINS | {"truediv"}:
        bare = bare[1:] if bare[0] == "i" or bare[1:] in ("add", "mul") else bare
    return {"truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}.get(bare, bare)


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
    found = [dim_of(d, rank) for d in listed] if isinstance(listed, Sequence) else [None]
    return [d for d in found if d is not None] if None not in found and len(set(found)) == len(found) else None
