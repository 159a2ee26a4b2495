"""Calls of a parallelized model from outside.

They are calls of the model, of a module of it, or through a method such as decode. A
module at or above a split layer that is called while no other call of the model is open
is an entry: all ranks agree before it, and what it returns holds plain tensors only.
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

from .parameters import Parameters, parameters_of
from .replica_sync import sync_replicated
from .split_layer import SplitLayer

F = TypeVar("F", bound=Callable[..., Any])


def eager(fn: F) -> F:
    """Makes a function, with all that it calls, one graph break of a compiled graph.

    Dynamo is imported only by programs that compile.
    """
    disabled = disable_dynamo(fn)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if dynamo_is_loaded() else fn)(*args, **kwargs)

    return run  # type: ignore[return-value]


class ModelContext:
    """State that the calls of one parallelized model share.

    Args:
        model: the root.
        group: the ranks.
        sync_every: number of forwards in training after which replicas are compared; 0 for
            never.
        signatures: number of input signatures for which call information is kept.
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
        """Returns whether a call of ``module`` comes from outside.

        A checkpoint that recomputes a region in the backward pass repeats the calls of the
        forward pass, and these are entries again.
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
        """Calls the forward of a module as an entry.

        Args:
            module: the module.
            forward: its forward.
            args: arguments of the forward.
            kwargs: keyword arguments of the forward.
            name: what the ranks agree to do; None for the forward of the module.

        Returns:
            What the forward returns, with plain tensors.

        Raises:
            DisagreementError: ranks make different calls; on all of them, before anything is
                sent.
            HetConvError: a parameter is not this rank's slice; or the call is traced, exported
                or transformed by `torch.func`; or the result cannot be searched for tensors.
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
        """Checks that all ranks make the same call. Collective."""
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
        """Returns the module's name in the model; empty for the model itself."""
        if module is self._model:
            return ""
        return next(
            (name for name, m in self._model.named_modules() if m is module),
            type(module).__name__,
        )

    def _scope(self, module: nn.Module, channels_last: bool) -> GradientSync:
        """Returns the gradient synchronization of a call; empty without autograd."""
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
    """A replacement for a module's forward, which makes calls from outside entries.

    A copy of the module gets its own.
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
        """Runs the module's forward, as an entry if the call comes from outside."""
        if not self._context.is_entry(self._module):
            return self._forward(*args, **kwargs)
        within_another = ACTIVE_SYNC.get() is not None
        with preserve_current() if within_another else nullcontext():
            return self._context.call(self._module, self._forward, args, kwargs)


def call_with_whole_weights(
    model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function that reads weights of a parallelized model. Collective.

    An example is a penalty in a training loop. Outside of the model's forward a weight is
    this rank's slice. In the function it is whole, as in the forward. The gradients of the
    result reach the slices.

    Args:
        model: a parallelized model.
        function: what to call, alike on every rank.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What the function returns, with plain tensors that are the same on every rank.

    Raises:
        HetConvError: the model is not parallelized, or the result cannot be searched for
            tensors.
        DisagreementError: ranks make different calls; on all of them, before anything is
            sent.
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
    """Returns a result with every HetTensor gathered. Collective."""
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
    """Returns whether a tensor is a batch of images in channels-last format only."""
    last = CHANNELS_LAST.get(x.dim())
    return (
        last is not None
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=last)
    )
