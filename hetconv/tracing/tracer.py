"""The tracer: runs a model once on fake tensors and records its operators.

Calls are read as the runtime reads them, so that a plan predicts what will run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetconv.containers import map_tensors, tensors_in
from hetconv.errors import HetConvError
from hetconv.operators import read_call
from hetconv.operators.base import Call, function_name, writes_in_place
from hetconv.operators.layers import READ_LAYER, plannable_layers
from hetconv.sharding.rule import Gather
from hetconv.torch_internals import (
    fake_tensor_log,
    fake_tensor_mode,
    storage_id,
    tree_iter,
)

from .graph import Graph, Node, Value
from .joined_rounds import with_joined_rounds
from .lifetimes import LifetimeRecorder
from .preserve import preserved


class _Recorder(TorchFunctionMode):
    """Records the calls of torch functions that read tensors of the graph."""

    def __init__(
        self, params: Mapping[str, Tensor], lifetimes: LifetimeRecorder | None
    ):
        super().__init__()
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.layers: list[str] = []  # names of the layers that are running
        # By id, with a reference that tells whether another tensor got the id.
        self._index: dict[int, tuple[ref[Tensor], int]] = {}
        self.params = tuple(self.add(p, name) for name, p in params.items())
        self.lifetimes = lifetimes

    def add(self, x: Tensor, param: str | None = None) -> int:
        """Adds a value. A tensor that was written to in place becomes a new one."""
        dtype = str(x.dtype).removeprefix("torch.")
        self.values.append(
            Value(tuple(x.shape), dtype, x.element_size(), x.requires_grad, param)
        )
        index = len(self.values) - 1
        self._index[id(x)] = ref(x), index
        return index

    def index(self, x: Tensor) -> int | None:
        """Returns the index of a tensor's current value, if it is in the graph."""
        known, index = self._index.get(id(x), (None, None))
        return index if known is not None and known() is x else None

    def known(self, tensors: Sequence[Tensor]) -> list[int]:
        """Returns the indices of those tensors that are in the graph."""
        found = map(self.index, tensors)
        return list(dict.fromkeys(i for i in found if i is not None))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, dict(kwargs))) if isinstance(x, Tensor)]
        sources = self.known(given)
        # Calls on nothing but parameters and constants are not part of the graph.
        if all(self.values[i].param is not None for i in sources):
            return func(*args, **kwargs)
        call = self._read(func, args, kwargs)
        if self.lifetimes is not None:
            self.lifetimes.before_node()
        result = func(*args, **kwargs)
        writes = writes_in_place(func, kwargs)
        results = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        if not results and writes:
            results = given[:1]
        if results:
            self._record(func, call, sources, given, results, writes)
        return result

    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call | None:
        name = getattr(func, "__name__", "")
        if self.layers and name in READ_LAYER:
            return READ_LAYER[name](args, kwargs)
        return read_call(func, args, kwargs)

    def _record(
        self,
        func: Callable[..., Any],
        call: Call | None,
        sources: list[int],
        given: list[Tensor],
        results: list[Tensor],
        writes: bool,
    ) -> None:
        """Adds a node.

        Args:
            func: The function.
            call: What was read of the call, if a rule fits it.
            sources: Indices of the tensors that it was given.
            given: All these tensors, also those that are not in the graph.
            results: The tensors that it returned or wrote to.
            writes: Whether it writes to its first argument.
        """
        name = getattr(func, "__name__", "call")
        written = {storage_id(x) for x in results}
        aliased = [x for x in given if storage_id(x) in written]
        views = [i for i in map(self.index, aliased) if i is not None]
        op: Any = Gather(tuple(results[0].shape))
        inputs = [i for i in sources if self.values[i].param is None]
        if call is not None:
            op = call.op
            indices = ((x, self.index(x)) for x in call.inputs)
            inputs = [self.add(x) if i is None else i for x, i in indices]
        if call is not None and call.params:
            params = [i for i in map(self.index, call.params) if i is not None]
        else:
            params = [i for i in sources if self.values[i].param is not None]
            params = [i for i in params if i not in inputs]
        layer = self.layers[-1] if self.layers and name in READ_LAYER else None
        self.nodes.append(
            Node(
                name=layer or f"{name}_{len(self.nodes)}",
                op=op,
                inputs=tuple(inputs),
                outputs=tuple(self.add(x) for x in results),
                params=tuple(params),
                layer=layer,
                views=tuple(views),
                function=function_name(func),
                writes=writes,
            )
        )
        if self.lifetimes is not None:
            self.lifetimes.add_node(results)


@contextmanager
def _named_layers(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tells the recorder which convolution or linear layer is running."""

    # A hook returns None, because anything else would replace the layer's result.
    def leave(*_: Any) -> None:
        recorder.layers.pop()

    handles = []
    for name, layer in plannable_layers(model).items():

        def enter(*_: Any, name: str = name) -> None:
            recorder.layers.append(name)

        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def capture(model: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Runs a model once on fake tensors and records every operator.

    The model is taken as it is: in training or evaluation mode, with gradients or,
    under `torch.no_grad`, without. Nothing is computed, and the model is left
    unchanged. Where the run depends on numbers, which fake tensors do not have, it is
    repeated for real on copies, with a warning that says why.

    Args:
        model: A module, or a method of one, such as ``vae.decode``.
        *args: What it is called with: tensors, in any container, and anything else. Of
            tensors only shape, data type and whether they require gradients are read,
            unless the run is repeated for real.
        **kwargs: Keyword arguments of the call, like ``args``.

    Returns:
        The graph. Its inputs are the tensors among the arguments, in their order.

    Raises:
        HetConvError: The model cannot be called with these arguments.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> [node.function for node in capture(model, torch.rand(1, 3, 8, 8)).nodes]
        ['conv2d', 'relu']
    """
    root = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(root, nn.Module):
        raise HetConvError(
            f"capture takes a torch.nn.Module or a method of one, but was given {model!r}"
        )
    # What autograd saves cannot be observed within transforms of torch.func.
    for observed in (True, False):
        try:
            with preserved(root):
                return _record_on_fakes(root, model, args, kwargs, observed)
        except Exception as e:
            reason = e
    try:
        with preserved(root, values=True):
            graph = _record(root, model, *map_tensors(_copy, (args, kwargs)))
    except Exception as e:
        shapes = [tuple(x.shape) for x in tensors_in((args, kwargs))]
        raise HetConvError(
            f"{type(root).__name__} could not be captured on inputs of {shapes}: {e}"
        ) from e
    first_line = str(reason).strip().partition("\n")[0]
    warnings.warn(
        f"{type(root).__name__} was run for real, on copies, to be captured: without numbers "
        f"it stops with {type(reason).__name__}: {first_line}",
        stacklevel=2,
    )
    return graph


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Keeps PyTorch from logging a failure that is raised, and may be mended by a real run."""
    log = fake_tensor_log()
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _record_on_fakes(
    root: nn.Module,
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    observed: bool,
) -> Graph:
    mode = fake_tensor_mode(allow_non_fake_inputs=True)

    def to_fake(x: Tensor) -> Tensor:
        fake: Tensor = mode.from_tensor(x.detach())
        return fake.requires_grad_(x.requires_grad)

    with mode, _quiet_fakes():
        # The run may write to buffers, so it gets fake ones.
        fakes: dict[int, Tensor] = {}
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    fake = fakes.setdefault(id(buffer), mode.from_tensor(buffer))
                    module._buffers[name] = fake
        args, kwargs = map_tensors(to_fake, (args, kwargs))
        if not observed:
            return _record(root, model, args, kwargs)
        others = (*root.parameters(), *root.buffers(), *tensors_in((args, kwargs)))
        lifetimes = LifetimeRecorder(others)
        with lifetimes.observing():
            return _record(root, model, args, kwargs, lifetimes)


def _record(
    root: nn.Module,
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    lifetimes: LifetimeRecorder | None = None,
) -> Graph:
    recorder = _Recorder(dict(root.named_parameters()), lifetimes)
    inputs = tuple(map(recorder.add, tensors_in((args, kwargs))))
    with _named_layers(root, recorder), recorder:
        result = model(*args, **kwargs)
    found = map(recorder.index, tensors_in(result))
    return with_joined_rounds(
        Graph(
            model=type(root).__name__,
            inputs=inputs,
            outputs=tuple(i for i in found if i is not None),
            params=recorder.params,
            values=tuple(recorder.values),
            nodes=tuple(recorder.nodes),
            lifetimes=lifetimes.lifetimes() if lifetimes is not None else None,
        )
    )
