"""What a call of a torch function means: the pure operator, and which of the arguments are its inputs.

The recorder and the runtime read calls here, so that a plan prices the operators that will run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .following import ACTIVATIONS, BatchNorm, Cat, Flatten, GlobalAveragePool, PixelShuffle, Pointwise, Pool
from .rules import Conv, Linear, Op
from .spec import Conv2dSpec, Window, pads_per_side

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

DROPOUT = frozenset({"alpha_dropout", "dropout", "dropout2d", "feature_dropout"})
UNARY = DROPOUT | frozenset(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid logsigmoid log_sigmoid tanh hardtanh hardswish
    hardsigmoid softplus softsign hardshrink softshrink tanhshrink threshold rsqrt sqrt square exp log log1p expm1
    abs neg sign sin cos erf reciprocal clamp clip clone contiguous detach float double half bfloat16 to nan_to_num
    round floor ceil
    """.split()
)
JOINS = frozenset(
    """
    add sub rsub mul div true_divide rdiv pow rpow maximum minimum atan2 fmod remainder where lerp addcmul addcdiv
    """.split()
)
WRITING_DUNDERS = frozenset(
    f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
)


@dataclass(frozen=True)
class Call:
    """An operator and the tensors that its rule reads, in order. ``in_place``: the first one is written to."""

    op: Op
    inputs: tuple[Tensor, ...]
    in_place: bool = False


@dataclass(frozen=True)
class BatchNormCall(Call):
    mean: Tensor | None = None
    var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    momentum: float = 0.1
    eps: float = 1e-5


def name_of(func: Callable[..., Any]) -> str:
    """add for add, add_, __add__, __iadd__ and __radd__ alike; rsub for __rsub__, for it is not symmetric."""
    name: str = getattr(func, "__name__", "")
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in "ir" and bare[1:] in JOINS | {"truediv"}:
        bare = bare[1:] if bare[0] == "i" or bare[1:] in ("add", "mul") else bare
    return {"truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}.get(bare, bare)


def writes_in_place(func: Callable[..., Any], kwargs: Kwargs) -> bool:
    """Whether a call writes to its first argument, by torch's naming."""
    name: str = getattr(func, "__name__", "")
    return bool(kwargs.get("inplace")) or name in WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def read(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Call | None:
    """The operator of a call, or None where there is no rule for it: then its inputs are gathered."""
    if kwargs.get("out") is not None:
        return None
    name = name_of(func)
    reader = READERS.get(name)
    if reader is None:
        return None
    call = reader(name, args, kwargs)
    return replace(call, in_place=writes_in_place(func, kwargs)) if call is not None else None


def _arg(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def conv_spec(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: torch.dtype,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Conv2dSpec:
    """``w_shape`` is that of the whole weight (K, C / groups, R, S)."""
    n, c, h, w = x_shape
    k, _, r, s = w_shape
    stride, dilation = _pair(stride), _pair(dilation)
    pads = pads_per_side(padding, (r, s), stride, dilation)
    return Conv2dSpec(n, c, h, w, k, r, s, stride, pads, dilation, groups, str(dtype).removeprefix("torch."))


def read_conv(args: Args, kwargs: Kwargs) -> Call | None:
    """A call of conv2d. Not among `READERS`: at run time only the modules that a plan names are cut."""
    x, w = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "weight")
    if x.dim() != 4:
        return None
    options = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1), (6, "groups", 1))
    rest = [_arg(args, kwargs, i, name, default) for i, name, default in options]
    return Call(Conv(conv_spec(x.shape, w.shape, x.dtype, *rest)), (x,))


def read_linear(args: Args, kwargs: Kwargs) -> Call | None:
    """A call of linear; see `read_conv`."""
    x, w = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "weight")
    return Call(Linear(tuple(x.shape), w.shape[0]), (x,))


def _pointwise(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    flat = [*args, *kwargs.values()]
    if name in DROPOUT and (_arg(args, kwargs, 2, "training", True) and _arg(args, kwargs, 1, "p", 0.5)):
        return None
    if name in UNARY and not isinstance(args[0] if args else kwargs.get("input"), Tensor):
        return None
    inputs = tuple(a for a in flat if isinstance(a, Tensor))
    if name == "to" and len(inputs) > 1:
        return None
    shapes = {tuple(x.shape) for x in inputs}
    shape = shapes.pop() if len(shapes) == 1 else tuple(torch.broadcast_shapes(*shapes))  # torch's takes its time
    return Call(Pointwise(shape), inputs)


def _batch_norm(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, mean, var, weight, bias, training, momentum, eps = (
        _arg(args, kwargs, i, n, d)
        for i, (n, d) in enumerate(
            (("input", None), ("running_mean", None), ("running_var", None), ("weight", None), ("bias", None),
             ("training", False), ("momentum", 0.1), ("eps", 1e-5))
        )
    )  # fmt: skip
    if x.dim() < 2 or (training and x.numel() == x.shape[1]):
        return None  # torch refuses a single value per channel: let it
    op = BatchNorm(tuple(x.shape), bool(training), bool(training) and mean is not None)
    return BatchNormCall(op, (x,), False, mean, var, weight, bias, momentum, eps)


def _pool(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, kernel = _arg(args, kwargs, 0, "input"), _pair(_arg(args, kwargs, 1, "kernel_size"))
    stride = _arg(args, kwargs, 2, "stride")
    stride = _pair(stride) if stride not in (None, (), []) else kernel
    pad, maximum = _pair(_arg(args, kwargs, 3, "padding", 0)), name == "max_pool2d"
    dilation = _pair(_arg(args, kwargs, 4, "dilation", 1)) if maximum else (1, 1)
    ceil = _arg(args, kwargs, 5 if maximum else 4, "ceil_mode", False)
    indices = maximum and _arg(args, kwargs, 6, "return_indices", False)
    count = True if maximum else _arg(args, kwargs, 5, "count_include_pad", True)
    divisor = None if maximum else _arg(args, kwargs, 6, "divisor_override")
    too_much = any(2 * p > k for p, k in zip(pad, kernel, strict=True))  # torch refuses it: let it
    if x.dim() != 4 or ceil or indices or divisor is not None or too_much:
        return None
    windows = tuple(Window(k, s, d, p, p) for k, s, d, p in zip(kernel, stride, dilation, pad, strict=True))
    shape = (*x.shape[:2], *(w.out_size(n) for w, n in zip(windows, x.shape[2:], strict=True)))
    if 0 in shape:
        return None
    return Call(Pool("max" if maximum else "average", shape, (windows[0], windows[1]), bool(count)), (x,))


def _adaptive(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, size = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "output_size")
    if x.dim() != 4 or tuple(size if isinstance(size, (tuple, list)) else (size, size)) != (1, 1):
        return None
    return Call(GlobalAveragePool((*x.shape[:2], 1, 1)), (x,))


def _pixel_shuffle(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x, r = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "upscale_factor")
    if x.dim() != 4 or x.shape[1] % (r * r):
        return None
    n, c, h, w = x.shape
    return Call(PixelShuffle((n, c // (r * r), h * r, w * r), r), (x,))


def _flatten(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    x = _arg(args, kwargs, 0, "input")
    if x.dim() == 0:
        return None
    start, end = (_arg(args, kwargs, i, n, d) % x.dim() for i, n, d in ((1, "start_dim", 0), (2, "end_dim", -1)))
    if start >= end:
        return None
    flat = tuple(x.shape[start : end + 1])
    return Call(Flatten((*x.shape[:start], torch.Size(flat).numel(), *x.shape[end + 1 :]), start, end), (x,))


def _cat(name: str, args: Args, kwargs: Kwargs) -> Call | None:
    tensors, dim = _arg(args, kwargs, 0, "tensors"), _arg(args, kwargs, 1, "dim", 0)
    dims = {x.dim() for x in tensors}
    if not isinstance(dim, int) or len(dims) != 1:
        return None
    dim %= dims.pop()
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return Call(Cat(tuple(shape), dim), tuple(tensors))


def activation_of(name: str, args: Args, kwargs: Kwargs) -> tuple[str, float] | None:
    """(name, slope below zero) of an activation that `kernels` computes as a result is stored, else None."""
    if name == "hardtanh":  # torch.nn.ReLU6 calls this
        bounds = _arg(args, kwargs, 1, "min_val", -1.0), _arg(args, kwargs, 2, "max_val", 1.0)
        return ("relu6", 0.0) if bounds == (0.0, 6.0) else None
    if name == "gelu":
        return ("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", 0.0)
    if name == "leaky_relu":
        return name, float(_arg(args, kwargs, 1, "negative_slope", 0.01))
    return (name, 0.0) if name in ACTIVATIONS else None


READERS: dict[str, Callable[[str, Args, Kwargs], Call | None]] = {
    **dict.fromkeys(UNARY | JOINS, _pointwise),
    "batch_norm": _batch_norm,
    "max_pool2d": _pool,
    "avg_pool2d": _pool,
    "adaptive_avg_pool2d": _adaptive,
    "pixel_shuffle": _pixel_shuffle,
    "flatten": _flatten,
    "cat": _cat,
}


def is_plain(layer: nn.Conv2d | nn.Linear) -> bool:
    """Whether a layer runs as torch's own does, on a weight and a bias that it owns; a subclass need not."""
    kind = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    same = all(getattr(type(layer), f, None) is getattr(kind, f, None) for f in ("forward", "_conv_forward"))
    return same and {"weight"} <= {name for name, _ in layer.named_parameters()} <= {"weight", "bias"}


def plannable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions and linears that a plan may name: plain ones that share no parameter with another module."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
        and is_plain(layer)
        and all(owners[id(p)] == 1 for p in layer.parameters())
    }
