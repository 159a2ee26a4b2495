"""All that hetconv reads inside PyTorch. Other modules use its public interface.

Each entry of `INTERNALS` says what is used, why, and what happens in a version of
PyTorch that has no such name: either hetconv does without it, or importing this module
raises `HetConvError`, which names it. The whole test suite passes with the versions in
`TESTED_WITH`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import HetConvError

TESTED_WITH = ("2.11", "2.13", "2.14")


class Internal(NamedTuple):
    """A name inside PyTorch.

    Attributes:
        module: where it is.
        name: the name.
        purpose: what it is used for.
        optional: whether hetconv works without it.
    """

    module: str
    name: str
    purpose: str
    optional: bool = False


INTERNALS = {
    "no_torch_function": Internal(
        "torch._C",
        "DisableTorchFunctionSubclass",
        "to ask a HetTensor what plain tensors are asked",
    ),
    "no_torch_dispatch": Internal(
        "torch._C",
        "_DisableTorchDispatch",
        "to hide the trial of a call from the user's counters and profilers",
        True,
    ),
    "make_wrapper": Internal(
        "torch",
        "Tensor._make_wrapper_subclass",
        "to make a HetTensor, which has no storage",
    ),
    "graph_task_id": Internal(
        "torch._C",
        "_current_graph_task_id",
        "to know that a checkpoint runs a region again in the backward pass",
    ),
    "at_end_of_backward": Internal(
        "torch.autograd.variable",
        "Variable._execution_engine.queue_callback",
        "to measure when a backward pass ends",
    ),
    "disable_dynamo": Internal(
        "torch._compile",
        "_disable_dynamo",
        "to leave a function out of compiled graphs without importing Dynamo",
        True,
    ),
    "fake_tensor_mode": Internal(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode",
        "to capture a model without computing",
    ),
    "dispatch_mode": Internal(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "to see by name what a CUDA graph cannot repeat",
    ),
    "checkpoint_saver": Internal(
        "torch.utils.checkpoint",
        "_NoopSaveInputs",
        "to leave inputs that a checkpoint only keeps in parts; PyTorch 2.13 keeps them "
        "without a function",
        True,
    ),
    "top_saved_tensors_hooks": Internal(
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks",
        "to compute norms at once where a checkpoint counts saved tensors",
        True,
    ),
    "transform_level": Internal(
        "torch._C._functorch",
        "maybe_current_level",
        "to refuse torch.func's transforms, which cannot follow messages",
        True,
    ),
    **{
        name: Internal(
            "torch._C",
            name,
            "to skip the operator registry where nothing watches operators",
            True,
        )
        for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack")
    },
    **{
        name: Internal(
            "torch._C",
            name,
            "to refuse gradients of a batch of cotangents (is_grads_batched)",
            True,
        )
        for name in ("_vmapmode_increment_nesting", "_vmapmode_decrement_nesting")
    },
    "clip_grads_with_norm_": Internal(
        "torch.nn.utils.clip_grad",
        "_clip_grads_with_norm_",
        "to refuse clipping by the norm of slices",
        True,
    ),
    "is_fx_tracing": Internal(
        "torch.fx._symbolic_trace",
        "is_fx_symbolic_tracing",
        "to refuse torch.fx.symbolic_trace by name",
        True,
    ),
    "unflatten_state_dict": Internal(
        "torch.distributed.checkpoint._nested_dict",
        "unflatten_state_dict",
        "to load an optimizer's nested state",
    ),
    "group_store": Internal(
        "torch.distributed.distributed_c10d",
        "_get_process_group_store",
        "to find ranks of different hosts that wait for each other in different calls",
        True,
    ),
    "gpu_sleep": Internal(
        "torch.cuda", "_sleep", "to let the host get ahead of a GPU that is measured"
    ),
    "foreach_copy_": Internal(
        "torch", "_foreach_copy_", "to copy many small tensors in one call", True
    ),
    "exception_wrapper": Internal(
        "torch._utils",
        "ExceptionWrapper",
        "to raise an error of another process with its class and its traceback",
    ),
    **{
        name: Internal(
            "torch.utils._pytree",
            name,
            "to search nested arguments and results for tensors",
        )
        for name in (
            "SUPPORTED_NODES",
            "tree_iter",
            "tree_map",
            "tree_map_only",
            "tree_leaves",
            "tree_structure",
            "tree_flatten_with_path",
            "keystr",
        )
    },
}
"""By the name under which this module offers it. Attributes of objects are read by the
functions below.
"""


def find(internal: Internal) -> Any:
    """The object that ``internal`` names; None if it is optional and this PyTorch does not have it.

    Raises:
        HetConvError: this PyTorch does not have it, and hetconv does not work without it.
    """
    try:
        found: Any = import_module(internal.module)
        for part in internal.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        if internal.optional:
            return None
        raise HetConvError(
            f"torch {torch.__version__} has no {internal.module}.{internal.name}, which "
            "hetconv needs "
            f"{internal.purpose}; install a version that hetconv was tested with: "
            f"{', '.join(TESTED_WITH)}"
        ) from e
    return found


no_torch_function: Any = find(INTERNALS["no_torch_function"])
no_torch_dispatch: Any = find(INTERNALS["no_torch_dispatch"]) or nullcontext
make_wrapper: Any = find(INTERNALS["make_wrapper"])
graph_task_id: Callable[[], int] = find(INTERNALS["graph_task_id"])
at_end_of_backward: Callable[[Callable[[], None]], None] = find(
    INTERNALS["at_end_of_backward"]
)
disable_dynamo: Callable[..., Any] = find(INTERNALS["disable_dynamo"]) or (
    lambda fn: fn
)
ExceptionWrapper: Any = find(INTERNALS["exception_wrapper"])
DispatchMode: Any = find(INTERNALS["dispatch_mode"])
tree_iter: Callable[..., Any] = find(INTERNALS["tree_iter"])
tree_map: Callable[..., Any] = find(INTERNALS["tree_map"])
tree_map_only: Callable[..., Any] = find(INTERNALS["tree_map_only"])
tree_leaves: Callable[..., Any] = find(INTERNALS["tree_leaves"])
tree_structure: Callable[..., Any] = find(INTERNALS["tree_structure"])
tree_flatten_with_path: Callable[..., Any] = find(INTERNALS["tree_flatten_with_path"])
keystr: Callable[..., str] = find(INTERNALS["keystr"])
_is_fx_tracing: Callable[[], bool] = find(INTERNALS["is_fx_tracing"]) or (lambda: False)
_deeper: Callable[[], int] = find(INTERNALS["_vmapmode_increment_nesting"]) or (
    lambda: 1
)
_less_deep: Callable[[], int] = find(INTERNALS["_vmapmode_decrement_nesting"]) or (
    lambda: 0
)
_dispatch_modes: Callable[[], int] = find(INTERNALS["_len_torch_dispatch_stack"]) or (
    lambda: 1
)
_function_modes: Callable[[], int] = find(INTERNALS["_len_torch_function_stack"]) or (
    lambda: 1
)
_transform_level: Callable[[], int | None] = find(INTERNALS["transform_level"]) or (
    lambda: None
)
_group_store: Callable[[dist.ProcessGroup], Any] | None = find(INTERNALS["group_store"])
checkpoint_saver: type | None = find(INTERNALS["checkpoint_saver"])
_top_saved_tensors_hooks: Callable[[bool], Any] = find(
    INTERNALS["top_saved_tensors_hooks"]
) or (lambda _: ())
_node_types: dict[type, Any] = find(INTERNALS["SUPPORTED_NODES"])


def tree_node_types() -> dict[type, Any]:
    """Returns the containers of PyTorch's pytrees, with the functions that open them."""
    return _node_types


def saved_tensors_are_hooked() -> bool:
    """Returns whether a checkpoint, or another hook, sees the tensors that autograd saves."""
    return _top_saved_tensors_hooks(False) is not None


def dynamo_is_loaded() -> bool:
    """Whether anything has been compiled by `torch.compile` in this process."""
    return "torch._dynamo" in sys.modules


def transform_in_use() -> bool:
    """Returns whether a transform of `torch.func`, or forward-mode autograd, is in use.

    A backward pass for a batch of cotangents counts too: PyTorch runs it by an older vmap.
    """
    if _transform_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return True
    if graph_task_id() == -1:
        return False
    _deeper()  # the depth is told by changing it alone
    return _less_deep() > 0


def runs_unobserved(*tensors: Tensor | None) -> bool:
    """Returns whether a function of these tensors is computed at once, and seen by nobody.

    That is not so for tensors of subclasses, under `torch.compile` and other tracers,
    under transforms of `torch.func`, and under modes that see operators or functions.

    Args:
        tensors: Arguments; any may be None.
    """
    if torch.compiler.is_compiling() or _dispatch_modes() or _function_modes():
        return False
    if tracer_in_use() or transform_in_use():
        return False
    for t in tensors:  # noqa: SIM110  a generator takes as long as all the rest
        if t is not None and type(t) not in _PLAIN:
            return False
    return True


_PLAIN = (Tensor, nn.Parameter)


def tracer_in_use() -> bool:
    """Whether `torch.jit.trace`, `torch.export` or `torch.fx.symbolic_trace` is running."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting() or _is_fx_tracing()  # type: ignore[attr-defined]


def unflatten_state_dict(flat: Any, paths: Any) -> dict[str, Any]:
    """A nested state dict of a flat one. Its module is imported by the first call only."""
    nested: dict[str, Any] = find(INTERNALS["unflatten_state_dict"])(flat, paths)
    return nested


def gpu_sleep(cycles: int) -> None:
    """Keeps the current GPU busy for so many of its clock cycles."""
    find(INTERNALS["gpu_sleep"])(cycles)


def fake_tensor_mode(**options: Any) -> Any:
    """Returns a mode that computes shapes alone; its large module is imported here only."""
    return find(INTERNALS["fake_tensor_mode"])(**options)


def fake_tensor_log() -> logging.Logger:
    """Returns where PyTorch logs what fails on fake tensors, beside raising it."""
    return logging.getLogger(INTERNALS["fake_tensor_mode"].module)


def foreach_copy_(
    targets: list[Tensor], sources: tuple[Tensor, ...] | list[Tensor]
) -> None:
    """Copies each source into the target beside it."""
    together = find(INTERNALS["foreach_copy_"])
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def storage_id(x: Tensor) -> int:
    """Returns a number that two tensors share exactly if they share memory.

    Unlike an address, fake tensors have it too.
    """
    return int(x.untyped_storage()._cdata)


def is_view(x: Tensor) -> bool:
    """Returns whether autograd takes ``x`` for a view of another tensor."""
    return bool(x._is_view())


def materialized(x: Tensor) -> Tensor:
    """Returns ``x`` with memory of its own, also for zeros that autograd makes without any."""
    return x.clone() if x._is_zerotensor() else x


def write_count(x: Tensor) -> int:
    """Returns how many times ``x`` was written to in place.

    Raises:
        RuntimeError: it is an inference tensor.
    """
    return int(x._version)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns how long the ranks of a gloo group wait for each other.

    It is PyTorch's default where the group does not tell.
    """
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except AttributeError:
        return timedelta(minutes=30)
    return timeout


def store_of(group: dist.ProcessGroup) -> Any:
    """Returns the `torch.distributed.Store` of a group; None where PyTorch does not tell."""
    store: Any = dist
    return (
        None
        if _group_store is None
        else store.PrefixStore("hetconv", _group_store(group))
    )


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Gives ``new`` the hooks of ``old``, and what each was registered with."""
    for name, hooks in vars(old).items():
        if "_hooks" in name and isinstance(hooks, dict):
            getattr(new, name).update(hooks)
    new._is_full_backward_hook = getattr(old, "_is_full_backward_hook", None)


def rebuild_buckets(wrapper: Any) -> None:
    """Has a `DistributedDataParallel` take its parameters anew, after their shapes changed."""
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._set_static_graph()
    hooks, wrapper._comm_hooks = wrapper._comm_hooks, []
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
