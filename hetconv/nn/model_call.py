"""Calls of a parallelized model: of the model itself, of its modules or of its methods.

A module that contains a split layer, or is one, is an entry if it is called while no
other call of the model is active. Before an entry's call all ranks check that they call
alike, and its result holds plain tensors. Calls within it just run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetconv.comm import call_tags
from hetconv.comm.consensus import checksum, start_consensus
from hetconv.comm.rank_group import RankGroup, refuse_transforms, run_backward_here
from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError
from hetconv.kernels import is_channels_last
from hetconv.runtime.gradient_sync import ACTIVE_SYNC, GradientSync, in_recomputation
from hetconv.runtime.het_tensor import (
    HetTensor,
    compute_deferred,
    discard_deferred,
    gather,
)
from hetconv.runtime.running_stats import RunningStats
from hetconv.runtime.step_monitor import StepMonitor
from hetconv.signature_cache import SignatureCaches, preserve_current
from hetconv.torch_internals import disable_dynamo, dynamo_is_loaded, tracer_in_use

from .parameters import NOT_PARALLELIZED, Parameters, parameters_of, split_layers
from .replica_sync import sync_replicated
from .split_layer import SplitLayer
from .step_graphs import Signature, StepGraphs

F = TypeVar("F", bound=Callable[..., Any])


def eager(fn: F) -> F:
    """Makes a function run eagerly in a compiled graph, as one graph break.

    Dynamo, which takes seconds to import, is used only if it is loaded already.
    """
    disabled = disable_dynamo(fn)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if dynamo_is_loaded() else fn)(*args, **kwargs)

    return run  # type: ignore[return-value]


class ModelContext:
    """State that the calls of one parallelized model share.

    Args:
        model: The root module.
        group: The ranks that it is parallelized over.
        sync_every: Forward passes in training after which replicas are compared; 0 for
            never.
        signatures: Number of input signatures for which it is cached how operators run.
        graphs: Captured steps of the model; None to run every step eagerly.

    Attributes:
        monitor: Measures the calls and their backward passes; None if nobody asks.
    """

    monitor: StepMonitor | None = None

    def __init__(
        self,
        model: nn.Module,
        group: RankGroup,
        sync_every: int,
        signatures: int,
        graphs: StepGraphs | None = None,
    ):
        self._model, self._group, self._sync_every = model, group, sync_every
        self._trained, self._running = 0, RunningStats(group)
        self._caches, self._graphs = SignatureCaches(signatures), graphs
        self._split_layers: list[SplitLayer] = []
        self._entered: set[int] = set()  # ids of modules that were entries

    def attach(self) -> None:
        """Replaces the forwards of all modules that contain a split layer."""
        for name, module in self._model.named_modules():
            if isinstance(module, SplitLayer):
                module.context, module.called = self, f"layer {name!r}"
                self._split_layers.append(module)
            elif module is self._model or any(
                isinstance(m, SplitLayer) for m in module.modules()
            ):
                module.forward = EntryForward(module, self)

    def forget_calls(self) -> None:
        """Drops what is cached of earlier calls, once the splits of layers have changed."""
        self._caches = copy.deepcopy(self._caches)
        self._graphs = copy.deepcopy(self._graphs)

    @property
    def captures_steps(self) -> bool:
        """Whether steps are captured in CUDA graphs."""
        return self._graphs is not None

    @property
    def is_active(self) -> bool:
        """Whether a call of the model is running."""
        scope = ACTIVE_SYNC.get()
        return scope is not None and scope.owner is self

    def is_entry(self, module: nn.Module) -> bool:
        """Returns whether a call of ``module`` is not within another call of the model.

        Checkpointing repeats calls of the forward pass in the backward pass: an entry of
        the forward pass is one again.
        """
        if self.is_active:
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
        """Calls an entry; collective.

        Args:
            module: The module that is called.
            forward: What to run.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            name: Name of the call, which ranks compare; None for the module's forward.

        Returns:
            The result with plain tensors.

        Raises:
            DisagreementError: On every rank, before tensors are exchanged, if ranks call
                differently.
            HetConvError: A parameter is not this rank's slice; or the call is traced,
                exported or transformed by `torch.func`; or its result cannot be searched
                for tensors.
        """
        _refuse_tracers(module)
        run_backward_here()
        called = functools.partial(self._called, module, forward, args, kwargs, name)
        if self.monitor is None:
            return called()
        with self.monitor.forward():
            result = called()
        self.monitor.watch_backward(tensors_in(result, opaque=True))
        return result

    def _called(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        name: str | None,
    ) -> Any:
        """Calls an entry, as `call` does, without measuring it."""
        tensors = tensors_in((args, kwargs), opaque=True)
        agreed = self._start_agreement(module, tensors, name)
        captured = self._captured(module, args, kwargs) if name is None else None
        counts = self._counts(module)
        sync_is_due = counts and (self._trained + 1) % self._sync_every == 0
        # What a graph launches waits for no agreement, which then comes while it runs.
        launches = captured is not None and captured.is_ready
        agrees_later = launches and not sync_is_due and not self._running.pending
        if not agrees_later:
            agreed()
            self._running.sync()
        if sync_is_due:
            sync_replicated(self._model)
        channels_last = any(map(is_channels_last, tensors))
        run = functools.partial(self._run, module, forward, channels_last)
        result = run(args, kwargs) if captured is None else captured(run, args, kwargs)
        if agrees_later:
            agreed()
        return result

    def _run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        channels_last: bool,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs an entry's forward after all ranks agreed; collective."""
        token = ACTIVE_SYNC.set(self._gradient_sync(module, channels_last))
        try:
            result = forward(*args, **kwargs)
            call_tags.enter("the result of the forward")
            whole = _plain(result)
            compute_deferred()  # later they would read changed parameters and inputs
            self._running.sync()
            return whole
        finally:
            discard_deferred()
            ACTIVE_SYNC.reset(token)

    def _captured(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Signature | None:
        """Returns the signature under which a call is captured; None if it never is."""
        if self._graphs is None:
            return None
        name = self._name_of(module) or type(module).__name__
        return self._graphs.signature(module, f"forward of {name}", args, kwargs)

    def _counts(self, module: nn.Module) -> bool:
        """Returns whether a call is a forward pass in training, which is counted."""
        trains = module.training and torch.is_grad_enabled()
        return trains and bool(self._sync_every) and not in_recomputation()

    def _start_agreement(
        self, module: nn.Module, tensors: list[Tensor], name: str | None
    ) -> Callable[[], None]:
        """Returns a function that raises on all ranks unless they call alike; collective."""
        inputs = ", ".join(
            f"{tuple(x.shape)} {x.dtype}{' requiring gradients' * x.requires_grad}"
            for x in tensors
        )
        call = (
            f"inputs {inputs or 'none'}; training {module.training}; gradients "
            f"{torch.is_grad_enabled()}; autocast {_autocast(self._model)}"
        )
        if self._running.pending:  # a forward pass raised an error before
            call += f"; running statistics of {self._running.pending} norms, not exchanged yet"
        if name is None:
            name = f"forward of {self._name_of(module)}".removesuffix(" of ")
        signature, values = name + call, ""
        if signature not in self._caches:  # values are compared once per signature
            plain = [x for x in tensors if not isinstance(x, HetTensor)]
            values = f"; checksums of input values {list(map(checksum, plain))}"
        errors = (layer.misfit() for layer in self._split_layers)
        misfit = next((error for error in errors if error is not None), None)
        agreement = start_consensus(self._group, name, call + values, misfit)

        def agreed() -> None:
            agreement()
            self._caches.use(signature)
            self._trained += self._counts(module)

        return agreed

    def _name_of(self, module: nn.Module) -> str:
        """Returns the module's name in the model; empty for the model itself."""
        if module is self._model:
            return ""
        return next(
            (name for name, m in self._model.named_modules() if m is module),
            type(module).__name__,
        )

    def _gradient_sync(self, module: nn.Module, channels_last: bool) -> GradientSync:
        """Returns what sums gradients of elements that several ranks hold, in one call."""
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
    """Replacement of a module's forward; a copy of the module gets its own.

    Args:
        module: A module that contains a split layer.
        context: What the calls of its model share.
    """

    def __init__(self, module: nn.Module, context: ModelContext):
        functools.update_wrapper(self, module.forward)
        self._module, self._forward, self._context = module, module.forward, context

    @property
    def __code__(self) -> Any:
        """Code of the module's forward, where `torch.export` reads argument names."""
        return getattr(self._forward, "__code__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, through the model's context if the call is an entry."""
        # Within an entry's call everything runs eagerly already.
        if not torch.compiler.is_compiling() and self._context.is_active:
            return self._forward(*args, **kwargs)
        return self._enter(*args, **kwargs)

    @eager
    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        if not self._context.is_entry(self._module):
            return self._forward(*args, **kwargs)
        within_another = ACTIVE_SYNC.get() is not None
        with preserve_current() if within_another else nullcontext():
            return self._context.call(self._module, self._forward, args, kwargs)


def call_with_whole_weights(
    model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function that reads weights of a parallelized model; collective.

    An example is a penalty in a training loop. Outside of the model's forward a weight
    is this rank's slice; in the function it is whole, as in the forward. Gradients of
    the result reach the slices.

    Args:
        model: A parallelized model.
        function: What to call, on every rank alike.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.

    Returns:
        The function's result with plain tensors, the same on every rank.

    Raises:
        HetConvError: The model is not parallelized, or the result cannot be searched
            for tensors.
        DisagreementError: On every rank, before tensors are exchanged, if ranks call
            differently.
    """
    contexts = (layer.context for layer in split_layers(model))
    context = next((c for c in contexts if c is not None), None)
    if context is None:
        raise HetConvError(NOT_PARALLELIZED)
    name = getattr(function, "__name__", type(function).__name__)
    return context.call(model, function, args, kwargs, f"{name}, with whole weights")


def _plain(result: Any) -> Any:
    """Returns the result with every HetTensor gathered; collective."""
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
