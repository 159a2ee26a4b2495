"""Changes to PyTorch that hetconv needs, made when the first rank group is used."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .torch_internals import INTERNALS, find

Undo = Callable[[], None]


_patches: list[Callable[[], Undo]] = []


_undo: list[Undo] | None = (
    None  # of the patches that are in force, or None while none is
)


def register_patch(patch: Callable[[], Undo]) -> None:
    """Registers a change to PyTorch that hetconv needs while it is in use.

    Args: patch: makes the change and returns what undoes it. It runs when the first
        process group is used, or at once if
            one is in use already.
    """
    _patches.append(patch)
    if _undo is not None:
        _undo.append(patch())


def install_patches() -> None:
    """Makes every registered change, unless they are in force already."""
    global _undo
    if _undo is None:
        _undo = [patch() for patch in _patches]


def remove_patches() -> None:
    """Undoes every change, the last one first."""
    global _undo
    for undo in reversed(_undo or []):
        undo()
    _undo = None


def replace_function_apply(
    wrap: Callable[[type, Callable[..., Any], Any, Any], Any],
) -> Undo:
    """Makes ``wrap`` run where `torch.autograd.Function.apply` is called.

    Args:
        wrap: has the arguments (cls, apply, args, kwargs); ``apply`` is PyTorch's own, bound
            to ``cls``.

    Returns:
        A function that undoes this.
    """
    plain: Any = inspect.getattr_static(
        torch.autograd.Function, "apply"
    )  # a classmethod, written in Python or in C

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrap(cls, plain.__get__(None, cls), args, kwargs)

    own = "apply" in vars(torch.autograd.Function)
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]

    def undo() -> None:
        if own:
            torch.autograd.Function.apply = plain  # type: ignore[method-assign]
        else:
            del torch.autograd.Function.apply

    return undo


def check_before_clipping(check: Callable[[list[Tensor]], None]) -> Undo:
    """Makes `torch.nn.utils.clip_grad_norm_` call a check before it changes gradients.

    `torch.nn.utils.clip_grads_with_norm_`, which is given a norm, does not.

    Args:
        check: has the parameters as its argument.

    Returns:
        A function that undoes this.
    """
    plain, module = (
        find(INTERNALS["clip_grads_with_norm_"]),
        import_module(INTERNALS["clip_grads_with_norm_"].module),
    )
    if plain is None:
        return lambda: None

    @functools.wraps(plain)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = (
            [parameters] if isinstance(parameters, Tensor) else list(parameters)
        )
        check(parameters)
        plain(parameters, *args, **kwargs)

    setattr(module, INTERNALS["clip_grads_with_norm_"].name, clip)
    return lambda: setattr(module, INTERNALS["clip_grads_with_norm_"].name, plain)


def check_before_unscaling(check: Callable[[Any, torch.optim.Optimizer], None]) -> Undo:
    """Makes a `torch.amp.GradScaler` call a check before it reads gradients.

    Args:
        check: has the scaler and the optimizer as its arguments.

    Returns:
        A function that undoes this.
    """
    plain: Any = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(plain)
    def unscale(
        scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        check(scaler, optimizer)
        return plain(scaler, optimizer, *args, **kwargs)

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign,assignment]
    return lambda: setattr(torch.amp.GradScaler, "_unscale_grads_", plain)


def check_before_replicating(check: Callable[[nn.Module, set[int]], None]) -> Undo:
    """Makes `DistributedDataParallel` call a check before it takes a module.

    Args:
        check: has the module, and the ranks that are to hold replicas of it, as its
            arguments.

    Returns:
        A function that undoes this.
    """
    plain: Any = DistributedDataParallel.__init__
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        mesh = given.get("device_mesh")
        group = mesh.get_group(0) if mesh is not None else given.get("process_group")
        check(given["module"], {*dist.get_process_group_ranks(group)})
        plain(*args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    return lambda: setattr(DistributedDataParallel, "__init__", plain)
