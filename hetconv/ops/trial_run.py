"""What PyTorch does with a call on one device.

It may refuse the call, return an argument, or return a view of one. A call is run once on
meta tensors of the global shapes, and the verdict is cached. All ranks make the same
calls, so that all come to the same verdict before anything is sent.
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
from hetconv.signature_cache import Cache
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
# They change a tensor's own record, or call back: nothing of that may happen twice.
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
Lay = Callable[[HetTensor], Tensor]
"""A tensor with the global shape of a HetTensor, in some order of memory, without its values."""


class Verdict(NamedTuple):
    """What a call of these shapes, dtypes and plain arguments does.

    Attributes:
        shapes: of the tensors that it returns; None if the trial could not tell.
        returns: indices of the HetTensors among its arguments that it returns.
        shares: whether the result shares memory with the first argument, without being it.
        by_order: whether the two above depend on the memory order of the first argument.
        empty: whether an argument or a result has no elements.
        reshapes: whether it changes the shape of an argument.
        writes: indices of the HetTensors that it writes to.
    """

    shapes: tuple[Shape, ...] | None = None
    returns: int | None = None
    shares: bool = False
    by_order: bool = False
    empty: bool = False
    reshapes: bool = False
    writes: tuple[int, ...] = ()


UNKNOWN = Verdict()
REFUSED_BY_META = Verdict(
    empty=True
)  # what is empty runs on whole tensors, where all ranks meet the same error
_known: Cache[tuple[Any, ...], Verdict] = Cache()


def trial(func: Func, args: Args, kwargs: Kwargs) -> tuple[Verdict, list[HetTensor]]:
    """Returns what a call does on one device, and the HetTensors among its arguments.

    Raises:
        Exception: PyTorch's own, where it refuses the call.
    """
    said: list[Any] = [func]
    found: list[HetTensor] = []
    for a in args:
        _sign(a, said, found)
    for name, a in kwargs.items():
        said.append(name)
        _sign(a, said, found)
    if None in said or func in NOT_TRIED or not found:
        return UNKNOWN, found
    kind = found[0].device.type
    if torch.is_autocast_enabled(kind):
        said.append(torch.get_autocast_dtype(kind))
    key = tuple(said)
    verdict = _known.current.get(key)
    if verdict is None:
        verdict = _known.add(key, _verdict(func, args, kwargs, found))
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


def _sign(a: Any, said: list[Any], found: list[HetTensor]) -> None:
    """Appends what decides the verdict of an argument; None if that is not known."""
    kind = a.__class__
    if kind is HetTensor:
        found.append(a)
        said.append((a.placement.shape, a.dtype))
    elif kind in PLAIN:
        said.append((kind, a))
    elif isinstance(a, Tensor):
        said.append((a.shape, a.dtype, a.device))
    elif kind is list or kind is tuple:
        said.append((kind, len(a)))
        for one in a:
            _sign(one, said, found)
    elif kind is slice:
        said.append(slice)
        for one in (a.start, a.stop, a.step):
            _sign(one, said, found)
    else:
        said.append(None)


def _verdict(
    func: Func, args: Args, kwargs: Kwargs, found: Sequence[HetTensor]
) -> Verdict:
    try:
        result, metas = _on_meta(func, args, kwargs, _contiguous)
    except NotImplementedError:
        return UNKNOWN
    except Exception as refused:
        return _confirmed(func, args, kwargs, refused)
    if any(
        not x.is_floating_point() or (x.dtype in HALF and x.device.type == "cpu")
        for x in found
    ):
        _check_dtypes(func, args, kwargs)
    tensors = [r for r in tree_iter(result) if isinstance(r, Tensor)]
    verdict = Verdict(
        tuple(tuple(r.shape) for r in tensors),
        empty=any(0 in t.shape for t in (*tensors, *found)),
        reshapes=any(
            tuple(m.shape) != x.placement.shape
            for m, x in zip(metas, found, strict=True)
        ),
        writes=_written(func, args, kwargs, found, metas),
    )
    if (
        not isinstance(result, Tensor)
        or writes_in_place(func, kwargs)
        or kwargs.get("out") is not None
    ):
        return verdict
    return _alias(verdict, func, args, kwargs, [_contiguous, _channels_last, _reversed])


def _written(
    func: Func,
    args: Args,
    kwargs: Kwargs,
    found: Sequence[HetTensor],
    metas: Sequence[Tensor],
) -> tuple[int, ...]:
    """Returns which of the HetTensors a call wrote to in its trial."""
    if "batch_norm" in function_name(
        func
    ):  # its writes to running statistics are not counted
        call = read_call(func, args, kwargs)
        statistics = (
            (call.mean, call.var) if isinstance(call, BatchNormCall) else args[3:5]
        )
        return tuple(i for i, x in enumerate(found) if any(x is s for s in statistics))
    return tuple(i for i, m in enumerate(metas) if write_count(m))


def _alias(
    verdict: Verdict, func: Func, args: Args, kwargs: Kwargs, orders: Sequence[Lay]
) -> Verdict:
    """Completes a verdict by trials with the first argument in several memory orders.

    Raises:
        Exception: PyTorch's own, where it refuses the call in all of them.
    """
    seen: list[tuple[int | None, bool]] = []
    errors: list[Exception] = []
    for lay in orders:
        try:
            result, metas = _on_meta(func, args, kwargs, lay)
        except Exception as error:  # a view that this order does not have
            errors.append(error)
            if len(errors) == len(orders):
                raise
            seen.append((None, False))
            continue
        returns = next((i for i, m in enumerate(metas) if m is result), None)
        seen.append((returns, storage_id(result) == storage_id(metas[0])))
    # Images are contiguous or channels-last: what only one of these returns as it is,
    # is a view that may be a copy.
    usual = seen[:2]
    return verdict._replace(
        returns=usual[0][0] if len(set(usual)) == 1 else None,
        shares=any(shares for _, shares in usual),
        by_order=verdict.by_order or len(set(seen)) > 1,
    )


def _on_meta(
    func: Func, args: Args, kwargs: Kwargs, lay: Lay
) -> tuple[Any, list[Tensor]]:
    """Runs a call on meta tensors, and returns its result and these tensors."""
    metas: dict[int, Tensor] = {}
    order: list[Tensor] = []
    own = next(
        a.device
        for a in tree_iter((list(args), dict(kwargs)))
        if isinstance(a, HetTensor)
    )

    def meta(a: Any) -> Any:
        if isinstance(a, torch.device):
            return (
                torch.device("meta")
                if a.type == own.type and a.index in (None, own.index)
                else a
            )
        if not isinstance(a, Tensor):
            return a
        if id(a) not in metas:
            metas[id(a)] = lay(a) if isinstance(a, HetTensor) else _like(a)
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
    # Tensors of inference mode do not count writes.
    with (
        no_torch_dispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return func(*tree_map(meta, list(args)), **tree_map(meta, named)), order


def _confirmed(func: Func, args: Args, kwargs: Kwargs, refused: Exception) -> Verdict:
    """Raises PyTorch's error of the real device, if that refuses the call as well."""
    try:
        _on_device(func, args, kwargs, _zeros)
    except Exception as error:
        if type(error) is type(refused) and "meta" not in str(refused):
            raise
        return REFUSED_BY_META
    return UNKNOWN


def _check_dtypes(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Raises PyTorch's error where the device cannot compute with these dtypes."""
    try:
        _on_device(func, args, kwargs, _zeros)
    except Exception as error:
        if "not implemented for" in str(error):
            raise


def _check_write(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Raises PyTorch's error where it does not let one of the views be written to."""
    try:
        _on_device(
            func,
            args,
            kwargs,
            lambda x: views.stand_in(x, device=x.device),
            torch.is_grad_enabled(),
        )
    except RuntimeError as error:  # another one is of the stand-in's values
        if any(
            words in str(error)
            for words in ("modified inplace", "in-place operation", "written-to")
        ):
            raise


def _on_device(
    func: Func, args: Args, kwargs: Kwargs, lay: Lay, with_grad: bool = False
) -> None:
    """Runs a call on the real device, with tensors from ``lay`` in place of HetTensors."""
    whole: dict[int, Tensor] = {}

    def real(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if id(a) not in whole:
            whole[id(a)] = lay(a) if isinstance(a, HetTensor) else a.detach().clone()
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
    """Returns a tensor with its dimensions in the opposite memory order."""
    shape = x.placement.shape
    return torch.empty(shape[::-1], dtype=x.dtype, device="meta").permute(
        *range(len(shape))[::-1]
    )
