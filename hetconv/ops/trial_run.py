"""Trial run of a call, which shows what PyTorch does with it on one device.

PyTorch may refuse a call, return an argument itself, or return a view of one. A call is
run once on meta tensors of the global shapes, and the verdict is cached. All ranks make
the same calls, so that all of them see an error before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetconv.kernels import CHANNELS_LAST
from hetconv.operators import read_call
from hetconv.operators.base import function_name, writes_in_place
from hetconv.operators.norms import BatchNormCall
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.inputs import Args, Func, Kwargs
from hetconv.sharding.layout import Shape
from hetconv.signature_cache import Cache, RecentlyUsed
from hetconv.torch_internals import (
    no_torch_dispatch,
    storage_id,
    tree_iter,
    tree_map,
    write_count,
)

from . import views

HALF = {torch.float16, torch.bfloat16}
PLAIN = {
    bool,
    float,
    int,
    complex,
    str,
    type(None),
    type(...),
    torch.device,
    torch.dtype,
    torch.memory_format,
    torch.layout,
    torch.Size,
}
# These change a tensor's autograd state or call back, which must not happen twice.
NOT_TRIED: set[Any] = {
    Tensor.backward,
    Tensor.requires_grad_,
    Tensor.apply_,
    Tensor.map_,
    Tensor.share_memory_,
    Tensor.pin_memory,
    *(getattr(Tensor, name).__set__ for name in ("grad", "data")),
    *(
        getattr(Tensor, name)
        for name in ("__deepcopy__", "__reduce_ex__", "__setstate__")
    ),
}
Alias = tuple[int | None, bool]
"""Index of the HetTensor that is the result, and whether it shares the first one's memory."""
MakeTensor = Callable[[HetTensor], Tensor]
"""Returns a tensor with the global shape of a HetTensor, without its values."""


class Verdict(NamedTuple):
    """Effects of a call with given shapes, dtypes and plain arguments.

    Attributes:
        shapes: Shapes of the tensors that it returns; None if the trial could not tell.
        returns: Index of the HetTensor that it returns, among those in its arguments.
        shares: Whether the result shares memory with the first argument, without being it.
        by_order: Whether ``returns`` and ``shares`` depend on the memory format of the
            first argument.
        empty: Whether an argument or a result has no elements.
        reshapes: Whether it changes the shape of an argument.
        writes: Indices of the HetTensors that it writes to.
    """

    shapes: tuple[Shape, ...] | None = None
    returns: int | None = None
    shares: bool = False
    by_order: bool = False
    empty: bool = False
    reshapes: bool = False
    writes: tuple[int, ...] = ()


UNKNOWN = Verdict()
# Like a call on empty tensors it runs on gathered ones, where all ranks raise one error.
REFUSED_BY_META = Verdict(empty=True)
_known: Cache[tuple[Any, ...], Verdict] = Cache()
# Of all models and signatures: blocks of a network repeat calls, and a trial takes a
# millisecond or more.
_recent: RecentlyUsed[tuple[Any, ...], Verdict] = RecentlyUsed(4096)


def trial(func: Func, args: Args, kwargs: Kwargs) -> tuple[Verdict, list[HetTensor]]:
    """Finds out what a call does on one device.

    Args:
        func: The torch function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The verdict, and the HetTensors among the arguments, in order.

    Raises:
        Exception: PyTorch's own, if it refuses the call.
    """
    signature: list[Any] = [func]
    found: list[HetTensor] = []
    for a in args:
        _sign(a, signature, found)
    for name, a in kwargs.items():
        signature.append(name)
        _sign(a, signature, found)
    if None in signature or func in NOT_TRIED or not found:
        return UNKNOWN, found
    kind = found[0].device.type
    if torch.is_autocast_enabled(kind):
        signature.append(torch.get_autocast_dtype(kind))
    key = tuple(signature)
    verdict = _known.current.get(key)
    if verdict is None:
        run = partial(_verdict, func, args, kwargs, found)
        verdict = _known.add(key, _recent.get((kind, *key), run))
    if verdict.by_order and views.shared(found[0]):
        verdict = _alias(
            verdict,
            func,
            args,
            kwargs,
            [views.stand_in, partial(views.stand_in, images=True)],
        )
    if any(views.may_be_refused(found[i]) for i in verdict.writes):
        _check_write(func, args, kwargs)
    return verdict, found


def _sign(a: Any, signature: list[Any], found: list[HetTensor]) -> None:
    """Adds what of an argument decides the verdict; None if that is not known."""
    kind = a.__class__
    if kind is HetTensor:
        found.append(a)
        signature.append((a.placement.shape, a.dtype))
    elif kind in PLAIN:
        signature.append((kind, a))
    elif isinstance(a, Tensor):
        signature.append((a.shape, a.dtype, a.device))
    elif kind is list or kind is tuple:
        signature.append((kind, len(a)))
        for item in a:
            _sign(item, signature, found)
    elif kind is slice:
        signature.append(slice)
        for item in (a.start, a.stop, a.step):
            _sign(item, signature, found)
    else:
        signature.append(None)


def _verdict(
    func: Func, args: Args, kwargs: Kwargs, found: Sequence[HetTensor]
) -> Verdict:
    try:
        result, metas = _on_meta(func, args, kwargs, _contiguous)
    except NotImplementedError:
        return UNKNOWN
    except Exception as refused:
        return _confirmed(func, args, kwargs, refused)
    half_on_cpu = any(x.dtype in HALF and x.device.type == "cpu" for x in found)
    if half_on_cpu or not all(x.is_floating_point() for x in found):
        _check_dtypes(func, args, kwargs)
    tensors = [r for r in tree_iter(result) if isinstance(r, Tensor)]
    verdict = Verdict(
        tuple(tuple(r.shape) for r in tensors),
        empty=any(0 in t.shape for t in (*tensors, *found)),
        reshapes=any(
            meta.shape != x.placement.shape
            for meta, x in zip(metas, found, strict=True)
        ),
        writes=_written(func, args, kwargs, found, metas),
    )
    writes = writes_in_place(func, kwargs) or kwargs.get("out") is not None
    if writes or not isinstance(result, Tensor):
        return verdict
    first = _alias_of(result, metas)
    return _alias(verdict, func, args, kwargs, [_channels_last, _reversed], first)


def _written(
    func: Func,
    args: Args,
    kwargs: Kwargs,
    found: Sequence[HetTensor],
    metas: Sequence[Tensor],
) -> tuple[int, ...]:
    """Returns the indices of the HetTensors that a call wrote to in its trial."""
    if "batch_norm" in function_name(
        func
    ):  # versions do not count its writes to statistics
        call = read_call(func, args, kwargs)
        statistics = (
            (call.mean, call.var) if isinstance(call, BatchNormCall) else args[3:5]
        )
        return tuple(i for i, x in enumerate(found) if any(x is s for s in statistics))
    return tuple(i for i, m in enumerate(metas) if write_count(m))


def _alias(
    verdict: Verdict,
    func: Func,
    args: Args,
    kwargs: Kwargs,
    orders: Sequence[MakeTensor],
    *seen_before: Alias,
) -> Verdict:
    """Completes the verdict by what the call returns for each of these memory formats.

    ``seen_before`` is what it returned for other ones.

    Raises:
        Exception: PyTorch's own, if it refuses the call in all of them.
    """
    seen, refused = list(seen_before), 0
    for make in orders:
        try:
            seen.append(_alias_of(*_on_meta(func, args, kwargs, make)))
        except Exception:  # this memory format has no such view
            refused += 1
            if refused == len(orders) and not seen_before:
                raise
            seen.append((None, False))
    # Images are contiguous or channels-last. A call that returns only one of these as it
    # is returns a view that may be a copy.
    of_images = seen[:2]
    return verdict._replace(
        returns=of_images[0][0] if len(set(of_images)) == 1 else None,
        shares=any(shares for _, shares in of_images),
        by_order=verdict.by_order or len(set(seen)) > 1,
    )


def _alias_of(result: Tensor, metas: Sequence[Tensor]) -> Alias:
    returns = next((i for i, m in enumerate(metas) if m is result), None)
    return returns, storage_id(result) == storage_id(metas[0])


def _on_meta(
    func: Func, args: Args, kwargs: Kwargs, make: MakeTensor
) -> tuple[Any, list[Tensor]]:
    """Runs a call on meta tensors; returns its result and each HetTensor's meta tensor."""
    metas: dict[int, Tensor] = {}
    order: list[Tensor] = []
    own = next(
        a.device
        for a in tree_iter((list(args), dict(kwargs)))
        if isinstance(a, HetTensor)
    )

    def meta(a: Any) -> Any:
        if isinstance(a, torch.device):
            is_own = a.type == own.type and a.index in (None, own.index)
            return torch.device("meta") if is_own else a
        if not isinstance(a, Tensor):
            return a
        if id(a) not in metas:
            metas[id(a)] = make(a) if isinstance(a, HetTensor) else _like(a)
        if isinstance(a, HetTensor):
            order.append(metas[id(a)])
        return metas[id(a)]

    if func is Tensor.cpu and own.type == "cpu":
        func, args, kwargs = Tensor.to, (args[0], own), {}
    elif func is Tensor.to and isinstance(args[1] if len(args) > 1 else None, str):
        args = (args[0], torch.device(args[1]), *args[2:])
    named = {
        k: torch.device(v) if k == "device" and isinstance(v, str) else v
        for k, v in kwargs.items()
    }
    # Tensors of inference mode have no versions, which count writes.
    with (
        no_torch_dispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return func(*tree_map(meta, list(args)), **tree_map(meta, named)), order


def _confirmed(func: Func, args: Args, kwargs: Kwargs, refused: Exception) -> Verdict:
    """Raises PyTorch's error if the real device refuses the call as well."""
    try:
        _on_device(func, args, kwargs, _zeros)
    except Exception as error:
        if type(error) is type(refused) and "meta" not in str(refused):
            raise
        return REFUSED_BY_META
    return UNKNOWN


def _check_dtypes(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Raises PyTorch's error if the device cannot compute with these dtypes.

    Meta tensors do not show this.
    """
    try:
        _on_device(func, args, kwargs, _zeros)
    except Exception as error:
        if "not implemented for" in str(error):
            raise


def _check_write(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Raises PyTorch's error if it does not allow to write to one of the views."""
    try:
        _on_device(
            func,
            args,
            kwargs,
            lambda x: views.stand_in(x, device=x.device),
            torch.is_grad_enabled(),
        )
    except RuntimeError as error:  # other errors come from the stand-in's values
        if any(
            phrase in str(error)
            for phrase in ("modified inplace", "in-place operation", "written-to")
        ):
            raise


def _on_device(
    func: Func, args: Args, kwargs: Kwargs, make: MakeTensor, with_grad: bool = False
) -> None:
    """Runs a call on the real device, with tensors that ``make`` gives for HetTensors."""
    whole: dict[int, Tensor] = {}

    def real(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if id(a) not in whole:
            whole[id(a)] = make(a) if isinstance(a, HetTensor) else a.detach().clone()
        return whole[id(a)]

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        no_torch_dispatch(),
        torch.random.fork_rng(devices),
        torch.set_grad_enabled(with_grad),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        func(*tree_map(real, list(args)), **tree_map(real, dict(kwargs)))


def _zeros(x: HetTensor) -> Tensor:
    return torch.zeros(x.placement.shape, dtype=x.dtype, device=x.device)


def _like(a: Tensor) -> Tensor:
    if a.layout != torch.strided:
        raise NotImplementedError
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")


def _contiguous(x: HetTensor) -> Tensor:
    return torch.empty(x.placement.shape, dtype=x.dtype, device="meta")


def _channels_last(x: HetTensor) -> Tensor:
    last = CHANNELS_LAST.get(len(x.placement.shape), torch.contiguous_format)
    return torch.empty(
        x.placement.shape, dtype=x.dtype, device="meta", memory_format=last
    )


def _reversed(x: HetTensor) -> Tensor:
    """Returns a tensor whose dimensions are stored in reverse, as after a transposition."""
    shape = x.placement.shape
    return torch.empty(shape[::-1], dtype=x.dtype, device="meta").permute(
        *range(len(shape))[::-1]
    )
