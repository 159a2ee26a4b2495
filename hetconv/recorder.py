"""capture: one run of a model on fake tensors, every operator recorded as the runtime would read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from .calls import READ_LAYER, Call, name_of, plannable_layers, read, writes_in_place
from .errors import HetConvError
from .graph import Graph, Node, Value
from .rules import Gather


class _Recorder(TorchFunctionMode):
    """Writes down each torch function that is given a value of the graph."""

    def __init__(self, params: Mapping[str, Tensor]):
        super().__init__()
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.layer: list[str] = []
        self._index: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self.params = tuple(self.add(p, name) for name, p in params.items())

    def add(self, x: Tensor, param: str | None = None) -> int:
        """A new value; the same tensor object, written to in place, becomes a new one."""
        dtype = str(x.dtype).removeprefix("torch.")
        self.values.append(Value(tuple(x.shape), dtype, x.element_size(), x.requires_grad, param))
        self._index[id(x)] = len(self.values) - 1
        self._alive.append(x)
        return len(self.values) - 1

    def index(self, x: Tensor) -> int | None:
        return self._index.get(id(x))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, dict(kwargs))) if isinstance(x, Tensor)]
        flows = any(self.values[i].param is None for x in given if (i := self.index(x)) is not None)
        call = self._read(func, args, kwargs) if flows else None
        sources = list(dict.fromkeys(i for x in given if (i := self.index(x)) is not None))
        result = func(*args, **kwargs)
        made = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        if not flows or (not made and not writes_in_place(func, kwargs)):
            return result
        self._record(func, call, sources, given, made or given[:1], writes_in_place(func, kwargs))
        return result

    def _read(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        name = getattr(func, "__name__", "")
        if self.layer and name in READ_LAYER:
            return READ_LAYER[name](args, kwargs)
        return read(func, args, kwargs)

    def _record(
        self, func: Callable[..., Any], call: Call | None, sources: list[int], given: list[Tensor], made: list[Tensor],
        writes: bool,
    ) -> None:  # fmt: skip
        name = getattr(func, "__name__", "call")
        memory = {x.untyped_storage()._cdata for x in made}
        views = tuple(
            i
            for x in given
            if (i := self.index(x)) in sources and x.untyped_storage()._cdata in memory and i is not None
        )
        if call is None:
            op: Any = Gather(tuple(made[0].shape))
            inputs = tuple(i for i in sources if self.values[i].param is None)
        else:
            op = call.op
            inputs = tuple(i if (i := self.index(x)) is not None else self.add(x) for x in call.inputs)
        extra = tuple(i for i in sources if self.values[i].param is not None and i not in inputs)
        if call is not None and call.params:
            extra = tuple(i for x in call.params if (i := self.index(x)) is not None)
        layer = self.layer[-1] if self.layer and name in READ_LAYER else None
        outputs = tuple(self.add(x) for x in made)
        label = layer or f"{name}_{len(self.nodes)}"
        self.nodes.append(Node(label, op, inputs, outputs, extra, layer, views, name_of(func), writes))


@contextmanager
def _named_layers(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """While a convolution or linear runs, the recorder knows its name."""

    def done(*_: Any) -> None:  # what a hook returns would be the layer's result, be it an empty name
        recorder.layer.pop()

    handles = []
    for name, layer in plannable_layers(model).items():
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: recorder.layer.append(name)))
        handles.append(layer.register_forward_hook(done))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def capture(model: nn.Module, *inputs: Tensor) -> Graph:
    """Runs ``model`` once on fake tensors like ``inputs`` and records every operator; nothing is computed or changed.

    The model is taken as it stands: in training or evaluation, with gradients or (under `torch.no_grad`) without.
    Raises `HetConvError` for a model whose run depends on the values of its input.
    """
    recorder = _Recorder(dict(model.named_parameters()))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        for x, fake in zip(inputs, fakes, strict=True):
            fake.requires_grad_(x.requires_grad)
        entries = tuple(recorder.add(x) for x in fakes)
        buffers: dict[str, Tensor] = {}  # so that none of the model's own is written to
        buffers |= {name: mode.from_tensor(b) for name, b in model.named_buffers()}
        try:
            with _named_layers(model, recorder), recorder:
                result = functional_call(model, buffers, tuple(fakes))
        except RuntimeError as e:
            raise HetConvError(
                f"{type(model).__name__} could not be captured on inputs of {[tuple(x.shape) for x in inputs]}: {e}"
            ) from e
    outputs = tuple(i for x in tree_iter(result) if isinstance(x, Tensor) and (i := recorder.index(x)) is not None)
    return Graph(type(model).__name__, entries, outputs, recorder.params, tuple(recorder.values), tuple(recorder.nodes))
