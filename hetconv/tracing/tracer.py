"""capture: one run of a model on fake tensors, every operator recorded as the runtime
would read it.
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
from hetconv.operators.base import Call, name_of, writes_in_place
from hetconv.operators.layers import READ_LAYER, plannable_layers
from hetconv.sharding.layer_rules import Gather
from hetconv.torch_internals import fake_tensor_mode, storage_id, tree_iter

from .graph import Graph, Node, Value
from .preserve import preserved


class _Recorder(TorchFunctionMode):
    """Writes down each torch function that is given a value of the graph."""

    def __init__(self, params: Mapping[str, Tensor]):
        super().__init__()
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.layer: list[str] = []
        self._index: dict[
            int, tuple[ref[Tensor], int]
        ] = {}  # by id, which another tensor may have later
        self.params = tuple(self.add(p, name) for name, p in params.items())

    def add(self, x: Tensor, param: str | None = None) -> int:
        """A new value; the same tensor object, written to in place, becomes a new one."""
        dtype = str(x.dtype).removeprefix("torch.")
        self.values.append(
            Value(tuple(x.shape), dtype, x.element_size(), x.requires_grad, param)
        )
        self._index[id(x)] = ref(x), len(self.values) - 1
        return len(self.values) - 1

    def index(self, x: Tensor) -> int | None:
        found = self._index.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, dict(kwargs))) if isinstance(x, Tensor)]
        flows = any(
            self.values[i].param is None
            for x in given
            if (i := self.index(x)) is not None
        )
        call = self._read(func, args, kwargs) if flows else None
        sources = list(
            dict.fromkeys(i for x in given if (i := self.index(x)) is not None)
        )
        result = func(*args, **kwargs)
        made = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        if not flows or (not made and not writes_in_place(func, kwargs)):
            return result
        self._record(
            func, call, sources, given, made or given[:1], writes_in_place(func, kwargs)
        )
        return result

    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call | None:
        name = getattr(func, "__name__", "")
        if self.layer and name in READ_LAYER:
            return READ_LAYER[name](args, kwargs)
        return read_call(func, args, kwargs)

    def _record(
        self,
        func: Callable[..., Any],
        call: Call | None,
        sources: list[int],
        given: list[Tensor],
        made: list[Tensor],
        writes: bool,
    ) -> None:
        name = getattr(func, "__name__", "call")
        memory = {storage_id(x) for x in made}
        views = tuple(
            i
            for x in given
            if (i := self.index(x)) in sources
            and storage_id(x) in memory
            and i is not None
        )
        if call is None:
            op: Any = Gather(tuple(made[0].shape))
            inputs = tuple(i for i in sources if self.values[i].param is None)
        else:
            op = call.op
            inputs = tuple(
                i if (i := self.index(x)) is not None else self.add(x)
                for x in call.inputs
            )
        extra = tuple(
            i for i in sources if self.values[i].param is not None and i not in inputs
        )
        if call is not None and call.params:
            extra = tuple(i for x in call.params if (i := self.index(x)) is not None)
        layer = self.layer[-1] if self.layer and name in READ_LAYER else None
        outputs = tuple(self.add(x) for x in made)
        label = layer or f"{name}_{len(self.nodes)}"
        self.nodes.append(
            Node(label, op, inputs, outputs, extra, layer, views, name_of(func), writes)
        )


@contextmanager
def _named_layers(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """While a convolution or linear runs, the recorder knows its name."""

    def done(
        *_: Any,
    ) -> None:  # what a hook returns would be the layer's result, be it an empty name
        recorder.layer.pop()

    handles = []
    for name, layer in plannable_layers(model).items():
        handles.append(
            layer.register_forward_pre_hook(
                lambda *_, name=name: recorder.layer.append(name)
            )
        )
        handles.append(layer.register_forward_hook(done))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def capture(model: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Runs a model once on fake tensors and records every operator; nothing is computed or changed.

    The model is taken as it stands: in training or evaluation, with gradients or (under
    `torch.no_grad`) without. Afterwards all that it holds is what it was, see
    `preserve`. Where the run depends on numbers, which fake tensors do not have, it is
    made once more for real, on copies, with a warning that says why.

    Args: model: a module, or a method of one, such as ``vae.decode``. *args: what it is
        called with: tensors, in any container, and anything else. Only their shapes,
        dtypes and
            whether they require gradients are read of tensors, unless the run is made for real.
        **kwargs: as ``args``.

    Returns:
        The graph. Its inputs are the tensors among the arguments, in their order.

    Raises:
        HetConvError: the model cannot be called with these arguments.
    """
    root = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(root, nn.Module):
        raise HetConvError(
            f"capture takes a torch.nn.Module or a method of one, but was given {model!r}"
        )
    try:
        with preserved(root):
            return _recorded_on_fakes(root, model, args, kwargs)
    except Exception as e:
        why = e
    try:
        with preserved(root, values=True):
            graph = _recorded(root, model, *map_tensors(_copied, (args, kwargs)))
    except Exception as e:
        shapes = [tuple(x.shape) for x in tensors_in((args, kwargs))]
        raise HetConvError(
            f"{type(root).__name__} could not be captured on inputs of {shapes}: {e}"
        ) from e
    warnings.warn(
        f"{type(root).__name__} was run for real, on copies, to be captured: without numbers "
        "it stops with "
        f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}",
        stacklevel=2,
    )
    return graph


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _recorded_on_fakes(
    root: nn.Module, model: Callable[..., Any], args: Any, kwargs: Any
) -> Graph:
    mode = fake_tensor_mode(allow_non_fake_inputs=True)

    def faked(x: Tensor) -> Tensor:
        fake: Tensor = mode.from_tensor(x.detach())
        return fake.requires_grad_(x.requires_grad)

    with mode:
        made: dict[int, Tensor] = {}
        for (
            module
        ) in root.modules():  # none of the model's own buffers may be written to
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = made.setdefault(id(b), mode.from_tensor(b))
        return _recorded(root, model, *map_tensors(faked, (args, kwargs)))


def _recorded(
    root: nn.Module, model: Callable[..., Any], args: Any, kwargs: Any
) -> Graph:
    recorder = _Recorder(dict(root.named_parameters()))
    entries = tuple(map(recorder.add, tensors_in((args, kwargs))))
    with _named_layers(root, recorder), recorder:
        result = model(*args, **kwargs)
    outputs = tuple(
        i for x in tensors_in(result) if (i := recorder.index(x)) is not None
    )
    return Graph(
        type(root).__name__,
        entries,
        outputs,
        recorder.params,
        tuple(recorder.values),
        tuple(recorder.nodes),
    )
