"""Calls of a parallelized model from outside: of the model, of a module of it, or
through a method such as decode.

Whichever module at or above a split layer is called while no call of the model is open
is the entry: all ranks agree before it, and what it returns holds plain tensors. Calls
within it only run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.consensus import assert_consensus, checksum
from hetconv.comm.rank_group import RankGroup, refuse_transforms, run_backward_here
from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError
from hetconv.kernels import CHANNELS_LAST
from hetconv.runtime.gradient_sync import ACTIVE_SYNC, GradientSync, in_recomputation
from hetconv.runtime.het_tensor import (
    HetTensor,
    compute_deferred,
    discard_deferred,
    gather,
)
from hetconv.runtime.running_stats import RunningStats
from hetconv.signature_cache import SignatureCaches, preserve_current
from hetconv.torch_internals import disable_dynamo, dynamo_is_loaded, tracer_in_use

from .layers import SplitLayer
from .parameters import Parameters, parameters_of
from .replica_sync import sync_replicated

F = TypeVar("F", bound=Callable[..., Any])


def eager(fn: F) -> F:
    """The same, with all that it calls, as one break of a compiled graph. Dynamo is
    imported by who compiles only.
    """
    disabled = disable_dynamo(fn)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if dynamo_is_loaded() else fn)(*args, **kwargs)

    return run  # type: ignore[return-value]


class ModelContext:
    """What the calls of one parallelized model share: its ranks, what they agreed on,
    its running statistics.

    Args:
        model: the root.
        group: the ranks that it is parallelized over.
        sync_every: forwards in training after which replicas are compared; 0 for never.
        signatures: of how many signatures of the inputs it remembers how operators run.
    """

    def __init__(
        self, model: nn.Module, group: RankGroup, sync_every: int, signatures: int
    ):
        self._model, self._group, self._sync_every = model, group, sync_every
        self._trained, self._running = 0, RunningStats(group)
        self._caches = SignatureCaches(signatures)
        self._cut: list[SplitLayer] = []
        self._entered: set[int] = set()  # ids of modules that were called from outside

    def attach(self) -> None:
        """Makes the model and each of its modules that contains a split layer an entry."""
        for name, module in self._model.named_modules():
            if isinstance(module, SplitLayer):
                module.context, module.called = self, f"layer {name!r}"
                self._cut.append(module)
            elif module is self._model or any(
                isinstance(m, SplitLayer) for m in module.modules()
            ):
                module.forward = EntryForward(module, self)

    def is_entry(self, module: nn.Module) -> bool:
        """Whether a call of ``module`` comes from outside.

        A checkpoint that runs a region again in the backward pass repeats the calls of
        the forward pass: what was called from outside then is so again.
        """
        scope = ACTIVE_SYNC.get()
        if scope is not None and scope.owner is self:
            return False
        if not in_recomputation():
            self._entered.add(id(module))
        return id(module) in self._entered

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        name: str | None = None,
    ) -> Any:
        """``forward(*args, **kwargs)`` of ``module``, with agreement before it and
        plain tensors after it.

        ``name``: what ranks agree to do; None for the forward of the module.

        Raises: DisagreementError: ranks call differently; on all of them, before
            anything moves. HetConvError: a parameter is not this rank's slice; or the
            call is traced, exported or transformed by
                `torch.func`, or returns what cannot be searched for tensors.
        """
        _refuse_tracers(module)
        run_backward_here()
        tensors = tensors_in((args, kwargs), opaque=True)
        self._agree(module, tensors, name)
        self._running.sync()
        if (
            module.training
            and torch.is_grad_enabled()
            and self._sync_every
            and not in_recomputation()
        ):
            self._trained += 1
            if self._trained % self._sync_every == 0:
                sync_replicated(self._model)
        token = ACTIVE_SYNC.set(
            self._scope(module, any(map(_is_channels_last, tensors)))
        )
        try:
            result = forward(*args, **kwargs)
            call_tags.enter("the result of the forward")
            whole = _plain(result)
            compute_deferred()  # what is left would read parameters and inputs as they are later
            self._running.sync()
            return whole
        finally:
            discard_deferred()
            ACTIVE_SYNC.reset(token)

    def _agree(
        self, module: nn.Module, tensors: list[Tensor], name: str | None
    ) -> None:
        """Collective."""
        said = ", ".join(
            f"{tuple(x.shape)} {x.dtype}{' requiring gradients' * x.requires_grad}"
            for x in tensors
        )
        said = (
            f"inputs {said or 'none'}; training {module.training}; gradients "
            f"{torch.is_grad_enabled()}"
        )
        said += f"; autocast {_autocast(self._model)}"
        if self._running.pending:  # of a forward that raised an error
            said += (
                f"; running statistics of {self._running.pending} norms, not told yet"
            )
        if name is None:
            name = f"forward of {self._name_of(module)}".removesuffix(" of ")
        values = ""
        if (
            (seen := name + said) not in self._caches
        ):  # once per signature: other batches are easy to get wrong
            values = (
                "; checksums of input values "
                f"{[checksum(x) for x in tensors if not isinstance(x, HetTensor)]}"
            )
        misfit = next(
            (error for layer in self._cut if (error := layer.misfit()) is not None),
            None,
        )
        assert_consensus(self._group, name, said + values, misfit)
        self._caches.use(seen)

    def _name_of(self, module: nn.Module) -> str:
        """The module's name in the model; empty of the model itself."""
        if module is self._model:
            return ""
        return next(
            (name for name, m in self._model.named_modules() if m is module),
            type(module).__name__,
        )

    def _scope(self, module: nn.Module, channels_last: bool) -> GradientSync:
        """Of the parameters of which several ranks hold the same elements; without
        autograd it needs none.
        """
        grad = torch.is_grad_enabled() and self._group.size > 1
        found = parameters_of(module) if grad else Parameters([], {}, set())
        shared = [
            p
            for p in found.every
            if id(p) not in found.shards or found.shards[id(p)].has_overlap
        ]
        return GradientSync(
            self._group,
            shared,
            found.shards,
            found.as_wired,
            channels_last=channels_last,
            running=self._running,
            owner=self,
        )


class EntryForward:
    """A module's forward, to stand in its place: a call from outside goes through its
    model's context.

    A copy of the module gets one of its own.
    """

    def __init__(self, module: nn.Module, context: ModelContext):
        functools.update_wrapper(self, module.forward)
        self._module, self._forward, self._context = module, module.forward, context

    @property
    def __code__(self) -> Any:
        """`torch.export` reads the names of the arguments there."""
        return getattr(self._forward, "__code__", None)

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._context.is_entry(self._module):
            return self._forward(*args, **kwargs)
        within_another = ACTIVE_SYNC.get() is not None
        with preserve_current() if within_another else nullcontext():
            return self._context.call(self._module, self._forward, args, kwargs)


def call_with_whole_weights(
    model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function that reads weights of a parallelized model, such as a penalty in
    a training loop; collective.

    Outside of the model's forward a weight is this rank's slice. In the function it is
    whole, as in the forward. What the function returns is a plain tensor, the same on
    every rank, and its gradients reach the slices.

    Args:
        model: a parallelized model.
        function: what to call, on every rank alike.
        args: of the function.
        kwargs: of the function.

    Returns:
        What the function returns, with plain tensors.

    Raises: HetConvError: the model is not parallelized, or the function returns what
        cannot be searched for tensors. DisagreementError: ranks call differently; on
        all of them, before anything moves.
    """
    context = next(
        (
            m.context
            for m in model.modules()
            if isinstance(m, SplitLayer) and m.context is not None
        ),
        None,
    )
    if context is None:
        raise HetConvError(
            "the model has no cut layer; call hetconv.parallelize(model, plan) first"
        )
    name = getattr(function, "__name__", type(function).__name__)
    return context.call(model, function, args, kwargs, f"{name}, with whole weights")


def _plain(result: Any) -> Any:
    """The result with every HetTensor gathered; collective."""
    if isinstance(result, Tensor):
        return gather(result, images=True)
    return map_tensors(functools.partial(gather, images=True), result)


def _refuse_tracers(module: nn.Module) -> None:
    if tracer_in_use():
        raise HetConvError(
            f"{type(module).__name__} is parallelized, and its messages between ranks cannot "
            "be traced or exported; "
            f"trace or export the plain model before hetconv.parallelize"
        )
    refuse_transforms()


def _autocast(model: nn.Module) -> torch.dtype | None:
    kind = next((p.device.type for p in model.parameters()), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_channels_last(x: Tensor) -> bool:
    """Whether it is a batch of images that lie so and no other way."""
    last = CHANNELS_LAST.get(x.dim())
    return (
        last is not None
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=last)
    )
