"""CUDA graphs of a model's steps, for `parallelize(..., graphs=True)`.

The first calls with one signature run eagerly. Then the forward, and in training its
backward, is captured with its messages, and later calls replay it. Each rank decides by
itself: a step that is replayed sends the messages of an eager one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError
from hetconv.runtime.gradient_sync import ACTIVE_SYNC, in_recomputation
from hetconv.runtime.graph_capture import (
    Capture,
    CaptureGuard,
    CudaCapture,
    NotCapturableError,
    aliased_parameters,
    no_autocast_cache,
)
from hetconv.runtime.het_tensor import HetTensor
from hetconv.runtime.module_state import has_hooks, modes_and_tensors
from hetconv.signature_cache import RecentlyUsed
from hetconv.torch_internals import (
    foreach_copy_,
    saved_tensors_are_hooked,
    write_count,
)

T = TypeVar("T")
EAGER_STEPS = 2
"""Steps of a signature before it is captured, in which kernels are chosen and compiled."""
MAX_SIGNATURES = 8
"""Signatures whose graphs are kept; each holds the memory of one step."""
PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format)
"""Types of arguments, beside tensors and containers, that are compared by value."""

Run = Callable[[Sequence[Any], dict[str, Any]], Any]
"""Runs a step eagerly, from positional and keyword arguments."""


class _Use:
    """One forward of a captured step, whose backward may still come."""

    is_over = False


class CapturedStep:
    """Graphs of one signature: a forward, and its backward if a result has a gradient.

    Args:
        capture: Captures both.
        run: Runs the step eagerly.
        args: Positional arguments, whose tensors are copied.
        kwargs: Keyword arguments, likewise.
        module: The module that runs, whose parameters get gradients.
        device: The device that the step runs on.

    Raises:
        NotCapturableError: The step does something that a graph cannot repeat.
    """

    def __init__(
        self,
        capture: Capture,
        run: Run,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        module: nn.Module,
        device: torch.device,
    ):
        self._guard = CaptureGuard(device)
        given = tensors_in((args, kwargs))
        with torch.inference_mode(False):
            own = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
        self._inputs, self.input_count = [x.detach() for x in own], len(own)
        copies = {id(x): copy for x, copy in zip(given, own, strict=True)}
        args, kwargs = map_tensors(lambda x: copies[id(x)], (tuple(args), kwargs))
        trained = [p for p in module.parameters() if p.requires_grad]
        self._parameters = trained if torch.is_grad_enabled() else []
        self._last_use: weakref.ref[_Use] | None = None
        with aliased_parameters(module, self._parameters) as aliases:
            with no_autocast_cache():
                forward = self._guarded(lambda: run(args, kwargs))
                self._forward, result = capture(forward)
            if any(write_count(x) for x in own):
                raise NotCapturableError("the model writes to its input")
            results = tensors_in(result)
            if any(y.device.type != device.type for y in results):
                raise NotCapturableError(f"a result is not on a {device.type} device")
            self.differentiable = [y.requires_grad for y in results]
            if any(self.differentiable):
                self._capture_backward(capture, [*own, *aliases], results)
        of_results = {id(y): y.detach() for y in results}
        self._result = map_tensors(lambda y: of_results[id(y)], result)
        self._results = [*of_results.values()]

    def _guarded(self, run: Callable[[], T]) -> Callable[[], T]:
        def guarded() -> T:
            with self._guard:
                return run()

        return guarded

    def _capture_backward(
        self, capture: Capture, sources: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        roots = [y for y in results if y.requires_grad]
        wanted = [x for x in sources if x.requires_grad]
        self._cotangents = [torch.empty_like(y) for y in roots]
        self._backward, found = capture(
            self._guarded(
                lambda: torch.autograd.grad(
                    roots, wanted, self._cotangents, allow_unused=True
                )
            )
        )
        by_id = {id(x): g for x, g in zip(wanted, found, strict=True)}
        self._gradients = [by_id.get(id(x)) for x in sources]

    @property
    def waits_for_backward(self) -> bool:
        """Whether the last forward's backward may still come, and reads its memory."""
        use = self._last_use() if self._last_use is not None else None
        return use is not None and not use.is_over

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Replays the forward on these arguments; the result is a copy."""
        inputs = tensors_in((args, kwargs))
        if any(self.differentiable):
            results = _Replayed.apply(self, *inputs, *self._parameters)
        else:
            results = self.replay_forward(inputs)
        copies = dict(zip(map(id, self._results), results, strict=True))
        return map_tensors(lambda y: copies[id(y)], self._result)

    def replay_forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Replays the forward and returns copies of its results."""
        if inputs:
            foreach_copy_(self._inputs, [x.detach() for x in inputs])
        self._forward()
        return _copied(self._results)

    def begin_use(self) -> _Use:
        """Notes that a backward may come, and returns what ends when it has."""
        use = _Use()
        self._last_use = weakref.ref(use)
        return use

    def replay_backward(
        self, use: _Use, cotangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Replays the backward and returns copies of the gradients.

        Args:
            use: Of the forward.
            cotangents: Gradients of the results that have one.

        Raises:
            HetConvError: The backward has run before, and its memory was used again.
        """
        if use.is_over:
            raise HetConvError(
                "a second backward pass goes through a step that was captured in a CUDA "
                "graph, which keeps nothing for it; call parallelize without graphs=True"
            )
        use.is_over = True
        foreach_copy_(self._cotangents, list(cotangents))
        self._backward()
        copies = iter(_copied([g for g in self._gradients if g is not None]))
        return [None if g is None else next(copies) for g in self._gradients]


class _Replayed(torch.autograd.Function):
    """A captured step as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, step: CapturedStep, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.use = step, step.begin_use()
        inputs = sources[: step.input_count]
        results = step.replay_forward(inputs)
        kinds = zip(results, step.differentiable, strict=True)
        ctx.mark_non_differentiable(*(y for y, has_grad in kinds if not has_grad))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kinds = zip(grads, ctx.step.differentiable, strict=True)
        cotangents = [g for g, has_grad in kinds if has_grad]
        return None, *ctx.step.replay_backward(ctx.use, cotangents)


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(x) for x in tensors]
    if copies:
        foreach_copy_(copies, list(tensors))
    return copies


class Signature:
    """Calls of a module with inputs of the same shapes, in the same modes.

    Args:
        module: The module that is called.
        name: What warnings call it.
        capture: Makes what captures a step.
        device: The device that the module runs on.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        capture: Callable[[], Capture],
        device: torch.device,
    ):
        self._module, self._name = module, name
        self._capture, self._device = capture, device
        self._addresses: Hashable = None
        self._eager_steps, self._captures = 0, True
        self._step: CapturedStep | None = None

    def refresh(self, addresses: Hashable) -> None:
        """Begins anew if a parameter or buffer is another one, or lies elsewhere.

        Args:
            addresses: Of all parameters and buffers.
        """
        if addresses != self._addresses:
            self._addresses, self._step = addresses, None
            self._eager_steps, self._captures = 0, True

    @property
    def is_ready(self) -> bool:
        """Whether the next call replays graphs that were captured before."""
        return self._step is not None and not self._step.waits_for_backward

    def __call__(self, run: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a step eagerly, or captures it and replays it."""
        if self._step is None and self._captures and self._eager_steps >= EAGER_STEPS:
            self._step = self._try_to_capture(run, args, kwargs)
        if self._step is not None and not self._step.waits_for_backward:
            return self._step(args, kwargs)
        self._eager_steps += 1
        return run(args, kwargs)

    def _try_to_capture(
        self, run: Run, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CapturedStep | None:
        """Returns the captured step, or None with a warning why there is none."""
        try:
            _refuse_hooks(self._module)
            return CapturedStep(
                self._capture(), run, args, kwargs, self._module, self._device
            )
        except Exception as e:  # whatever CUDA or a model may raise
            self._captures = False
            reason = (
                e if isinstance(e, NotCapturableError) else f"{type(e).__name__}: {e}"
            )
            _warn_eager(self._name, str(reason))
            return None


def _warn_eager(name: str, reason: str) -> None:
    """Warns that a call runs eagerly in spite of ``graphs=True``, and why."""
    warnings.warn(
        f"{name} runs eagerly, because a CUDA graph cannot repeat it: {reason}",
        stacklevel=2,
    )


class StepGraphs:
    """Captured steps of one parallelized model, by signature.

    Args:
        device: The device that it runs on.
        capture: Makes what captures the functions of one step.
    """

    def __init__(self, device: torch.device, capture: Callable[[], Capture]):
        self._device, self._capture = device, capture
        self._known: RecentlyUsed[Hashable, Signature] = RecentlyUsed(MAX_SIGNATURES)
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: object) -> StepGraphs:
        return StepGraphs(self._device, self._capture)  # graphs are of one model

    def signature(
        self, module: nn.Module, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Signature | None:
        """Returns the signature of a call; None if it must run eagerly.

        Args:
            module: The module that is called.
            name: What warnings call it.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        nested = ACTIVE_SYNC.get() is not None or in_recomputation()
        if nested or saved_tensors_are_hooked():
            return None
        try:
            arguments = self._key((args, kwargs), {})
        except NotCapturableError as e:
            if str(e) not in self._warned:
                self._warned.add(str(e))
                _warn_eager(name, str(e))
            return None
        modes, tensors = modes_and_tensors(module)
        gradients = [x.requires_grad for x in tensors]
        key = arguments, _modes(self._device), (*modes, *gradients)
        found = self._known.get(
            key, lambda: Signature(module, name, self._capture, self._device)
        )
        found.refresh((*map(id, tensors), *[x.data_ptr() for x in tensors]))
        return found

    def _key(self, value: Any, seen: dict[int, int]) -> Hashable:
        """Returns what of an argument decides whether a graph fits it.

        ``seen`` has the tensors so far: one that is given twice is one input.
        """
        kind = type(value)
        if isinstance(value, Tensor):
            if isinstance(value, HetTensor):
                raise NotCapturableError("an input is a HetTensor")
            if value.device != self._device:
                raise NotCapturableError(
                    f"an input is on {value.device}, not on {self._device}"
                )
            number = seen.setdefault(id(value), len(seen))
            layout = tuple(value.shape), value.stride(), value.dtype
            return number, layout, value.requires_grad
        if kind in (tuple, list):
            return kind, tuple(self._key(v, seen) for v in value)
        if kind is dict:
            return kind, tuple((k, self._key(v, seen)) for k, v in value.items())
        if value is None or isinstance(value, PLAIN):
            return kind, value
        raise NotCapturableError(f"an argument is a {kind.__name__}")


def _modes(device: torch.device) -> Hashable:
    """Returns the modes of this thread that decide what operators do."""
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast


def _refuse_hooks(module: nn.Module) -> None:
    """Raises `NotCapturableError` if a hook would run at the capture alone."""
    for name, m in module.named_modules():
        if m is not module and has_hooks(m):  # the module's own run outside of it
            raise NotCapturableError(f"module {name!r} has hooks")


def cuda_graphs(device: torch.device) -> StepGraphs:
    """Returns what captures the steps of a model on a GPU."""
    return StepGraphs(device, lambda: CudaCapture(device))
