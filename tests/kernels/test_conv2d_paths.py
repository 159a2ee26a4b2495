"""`kernels.conv2d` in eager mode, and as an operator where something watches: the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hetconv import kernels
from hetconv.kernels import conv2d_op
from tests.interpreter import DEVICE, SAME, images, tensors

SPEC = images(8, 12, (6, 5), 3, 3, (1, 1), SAME, dtype="float32")
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


@pytest.fixture
def by_operator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operators compute."""
    calls: list[str] = []
    for name in ("_by_operator", "_gradients_by_operator"):
        run = getattr(conv2d_op, name)
        monkeypatch.setattr(conv2d_op, name, recorded(run, name, calls))
    return calls


def recorded(
    run: Callable[..., Any], name: str, calls: list[str]
) -> Callable[..., Any]:
    def recording(*args: Any) -> Any:
        calls.append(name)
        return run(*args)

    return recording


def inputs(
    layout: str = "NHWC",
    wanted: tuple[bool, ...] = (True, True, True),
    bias: bool = True,
) -> Inputs:
    t = tensors(SPEC)
    x, w, g = (
        s.clone().contiguous(memory_format=FORMATS[layout]) for s in (t.x, t.w, t.g)
    )
    b = t.bias.clone() if bias else None
    for s, is_wanted in zip((x, w, b), wanted, strict=True):
        if s is not None:
            s.requires_grad_(is_wanted)
    return x, w, b, g


def results(given: Inputs, backend: Any, **how: Any) -> list[Tensor | None]:
    """The result and all gradients."""
    x, w, b, g = given
    y = kernels.conv2d(x, w, b, padding=1, backend=backend, **how)
    if y.requires_grad:
        y.backward(g.to(y.dtype))
    return [y, *(t.grad if t is not None else None for t in (x, w, b))]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine is not None
        assert mine.equal(theirs)
        assert mine.stride() == theirs.stride()
        assert mine.dtype == theirs.dtype
        assert mine.requires_grad == theirs.requires_grad


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
}


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_both_paths_give_the_same(
    backend: str,
    layout: str,
    bias: bool,
    mode: str,
    by_operator: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MODES[mode]():
        found = results(inputs(layout, bias=bias), backend)
        assert by_operator == []
        monkeypatch.setattr(conv2d_op, "runs_unobserved", lambda *_: False)
        expected = results(inputs(layout, bias=bias), backend)
    assert by_operator
    assert_same(found, expected)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, True), (False,) * 3]
)
def test_both_paths_give_the_gradients_that_are_wanted(
    wanted: tuple[bool, ...], by_operator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(inputs(wanted=wanted), "triton")
    assert by_operator == []
    monkeypatch.setattr(conv2d_op, "runs_unobserved", lambda *_: False)
    assert_same(found, results(inputs(wanted=wanted), "triton"))
    assert [t is not None for t in found[1:]] == list(wanted)


def test_parameters_are_plain(by_operator: list[str]) -> None:
    x, w, _, g = inputs()
    weight = nn.Parameter(w.detach())
    kernels.conv2d(x, weight, padding=1).backward(g)
    assert weight.grad is not None
    assert by_operator == []


class Seen(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return kernels.conv2d(x, w, padding=1)


def fake(x: Tensor, w: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = convolved(x, w)
    return torch.zeros(y.shape)


def with_mode(mode: Callable[[], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, w: Tensor) -> Tensor:
        with mode():
            return convolved(x, w)

    return run


def traced(x: Tensor, w: Tensor) -> Tensor:
    graph = make_fx(convolved)(x, w)
    assert torch.ops.hetconv.conv2d.default in {n.target for n in graph.graph.nodes}
    y: Tensor = graph(x, w)
    return y


def vmapped(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = torch.func.vmap(convolved, (0, None))(x[None], w)
    return y[0]


def forward_mode(x: Tensor, w: Tensor) -> Tensor:
    y, _ = torch.func.jvp(convolved, (x, w), (x, w))
    return y


WATCHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fake tensors": fake,
    "function mode": with_mode(Seen),
    "dispatch mode": with_mode(Dispatched),
    "make_fx": traced,
    "torch.func.vmap": vmapped,
    "torch.func.jvp": forward_mode,
    "subclass": lambda x, w: convolved(x.as_subclass(Subclass), w),
    "torch.jit.trace": lambda x, w: torch.jit.trace(convolved, (x, w))(x, w),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # since torch 2.14
@pytest.mark.parametrize("name", WATCHERS)
def test_where_something_watches_it_is_an_operator(
    name: str, by_operator: list[str]
) -> None:
    x, w, _, _ = inputs(wanted=(False, False, False))
    found = WATCHERS[name](x, w)
    assert "_by_operator" in by_operator
    assert found.shape == (2, 12, 6, 5)


def test_gradients_of_a_batch_of_cotangents(by_operator: list[str]) -> None:
    x, w, _, g = inputs()
    y = convolved(x, w)
    batch = torch.stack([g, 2 * g])
    (found,) = torch.autograd.grad(
        y, x, batch, is_grads_batched=True, retain_graph=True
    )
    assert by_operator == ["_gradients_by_operator"]
    (expected,) = torch.autograd.grad(y, x, g)
    assert torch.allclose(found, torch.stack([expected, 2 * expected]))
