"""Norms that wait for the convolution that reads them, so that one round serves both.

A norm whose statistics several ranks share is deferred, with the elementwise functions
that follow it. If a convolution with halos reads the result, ranks send their moments and
their boundary rows, not yet normalized, as one message. Each then normalizes its own
rows and the halos in one buffer. Any other use computes the norm first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetconv.comm.rank_group import RankGroup
from hetconv.kernels import norms
from hetconv.operators.base import function_name, writes_in_place
from hetconv.operators.elementwise import ZERO_AT_ZERO, activation_of
from hetconv.ops import views
from hetconv.ops.conv_geometry import Region
from hetconv.ops.halo_exchange import narrow
from hetconv.runtime.gradient_sync import ACTIVE_SYNC, synced_grad
from hetconv.runtime.het_tensor import HetTensor, gather
from hetconv.runtime.inputs import Args, Func, Kwargs
from hetconv.sharding.layout import Layout
from hetconv.torch_internals import saved_tensors_are_hooked, storage_id

from .group_norm import GroupStatistics, SplitGroupNorm, known_statistics
from .normalized_region import NormalizedRegion, NormCall, normalized_rows


class Elementwise(NamedTuple):
    """Elementwise function of a deferred norm.

    Attributes:
        function: The function, which is called on a new tensor.
        activation: The same for a kernel that computes it, or None if none does.
    """

    function: Callable[[Tensor], Tensor]
    activation: norms.Activation | None


class DeferredNorm:
    """A norm, and elementwise functions of it, that are computed when they are used.

    Attributes:
        call: The norm.
        functions: The functions, in order.
    """

    def __init__(self, call: NormCall, functions: tuple[Elementwise, ...] = ()):
        self.call, self.functions = call, functions

    @property
    def is_local(self) -> bool:
        """Whether other ranks take no part any more."""
        return self.call.known is not None

    def reads(self, memory: int) -> bool:
        """Returns whether the input lies in the storage with this id."""
        return storage_id(self.call.x) == memory

    def __call__(self) -> Tensor:
        """Computes this rank's shard; collective if moments are still to be exchanged."""
        c = self.call
        if c.graded and saved_tensors_are_hooked():
            # A checkpoint that began later must not count what this saves.
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                return self._computed()
        return self._computed()

    def _computed(self) -> Tensor:
        c = self.call
        if c.known is None:
            with torch.no_grad():
                c.known = known_statistics(c.x, c.statistics)
        with torch.set_grad_enabled(c.graded):
            if c.graded:
                y = SplitGroupNorm.apply(c.x, c.weight, c.bias, c.statistics, c.known)
            else:
                eps = c.statistics.eps
                numbers = (*c.known, c.weight, c.bias, eps)
                y = norms.normalized(c.x, *numbers, self.fused)
            return self._applied(y)

    def gathered(self) -> None:
        """Returns None: a norm is computed before it is gathered."""

    def may_fill(self) -> bool:
        """Returns whether a convolution that runs now may read `filled` rows."""
        c = self.call
        return c.graded == torch.is_grad_enabled() and not (
            c.graded and saved_tensors_are_hooked()
        )

    def filled(self, region: Region) -> Tensor:
        """Computes all rows that a convolution reads; collective."""
        c = self.call
        if c.graded:
            y = NormalizedRegion.apply(c.x, c.weight, c.bias, c, region)
        else:
            x = norms.as_images(c.x)
            y, _ = normalized_rows(x, c.weight, c.bias, c, region, self.fused)
        return self._applied(y)

    @property
    def fused(self) -> norms.Activation | None:
        """The activation that is computed as the norm is: the first function, on Triton.

        In training it is a node of autograd of its own.
        """
        c = self.call
        if c.graded or not self.functions or not norms.runs_on_triton(c.x):
            return None
        return self.functions[0].activation

    def _applied(self, y: Tensor) -> Tensor:
        """Returns what the functions that are not `fused` make of y."""
        rest = self.functions if self.fused is None else self.functions[1:]
        for each in rest:
            y = each.function(y)
        return y


def _same(x: Tensor) -> Tensor:
    return x


def deferred(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: GroupStatistics
) -> HetTensor | None:
    """Returns the result of a norm, not computed yet, or None if it is to be computed now.

    Args:
        x: This rank's shard of the input.
        weight: (c,), or None.
        bias: (c,), or None.
        statistics: How ranks find the statistics.
    """
    output, (move,) = statistics.sharding.output, statistics.sharding.forward_moves
    if len(move.forward) != 1 or not _may_wait(x, output, statistics.group):
        return None
    if torch.is_grad_enabled() and saved_tensors_are_hooked():
        return None
    later = DeferredNorm(NormCall(x, weight, bias, statistics))
    return HetTensor.deferred(later, output, x.dtype, x.device, statistics.group)


def _may_wait(x: Tensor, output: Layout, group: RankGroup) -> bool:
    """Returns whether a norm of a shard may wait for a convolution with halos."""
    scope = ACTIVE_SYNC.get()
    within = scope is not None and scope.group is group
    cuts_space = output.inner_dim is not None and output.inner_dim >= 2
    return within and cuts_space and not torch.is_autocast_enabled(x.device.type)


def followed(func: Func, args: Args, kwargs: Kwargs) -> HetTensor | None:
    """Defers an elementwise function of a deferred norm.

    Args:
        func: The torch function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result, or None if the call is of another kind.
    """
    x = args[0] if args else None
    if x.__class__ is not HetTensor or x.pending.__class__ is not DeferredNorm:
        return None
    later = x.pending
    assert isinstance(later, DeferredNorm)
    function = None
    if later.call.graded == torch.is_grad_enabled():
        function = _elementwise(x, func, args, kwargs)
    if function is None:
        return None
    in_place = writes_in_place(func, kwargs)
    if in_place and not views.may_write(x, x.placement):
        return None
    activation = activation_of(function_name(func), args, kwargs)
    functions = (*later.functions, Elementwise(function, activation))
    y = x.superseded_by(DeferredNorm(later.call, functions))
    if not in_place:
        return y
    x.become(y)
    return x


def _elementwise(
    x: HetTensor, func: Func, args: Args, kwargs: Kwargs
) -> Callable[[Tensor], Tensor] | None:
    """Returns a call as a function of a new tensor; None if it may not be deferred."""
    name, graded = function_name(func), torch.is_grad_enabled()
    if name not in ZERO_AT_ZERO:
        return None
    if name == "relu":
        return torch.relu_
    if name == "silu":
        return partial(F.silu, inplace=not graded)
    rest = {k: v for k, v in kwargs.items() if k != "inplace"}
    if name == "prelu":
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if not isinstance(weight, Tensor):
            return None
        return partial(_prelu, weight=synced_grad(x.group, gather(weight)))
    if any(isinstance(a, Tensor) for a in (*args[1:], *rest.values())):
        return None
    plain = getattr(F, name, None) or getattr(torch, name)
    return lambda y: plain(y, *args[1:], **rest)


def _prelu(y: Tensor, weight: Tensor) -> Tensor:
    return F.prelu(y, weight)


def normalized_region(x: Tensor, region: Region | None) -> Tensor | None:
    """Returns all rows that a convolution reads, if its input is a deferred norm.

    Args:
        x: The input.
        region: What the convolution reads, if that can be one buffer.

    Returns:
        The buffer; None if the input is to be computed first.
    """
    if region is None or x.__class__ is not HetTensor:
        return None
    later = x.pending
    if not isinstance(later, DeferredNorm) or not later.may_fill():
        return None
    rows = later.filled(region)
    of_own, own = region.own
    size = x.placement.boxes[region.rank].shape[region.dim]
    if not later.call.graded and of_own == (0, size):
        # The result is in the buffer, so that the input of the norm is not needed any more.
        x.local = narrow(rows, region.dim, own)
    else:
        x.leave_deferred()
    return rows
