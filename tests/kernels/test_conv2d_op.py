"""`kernels.conv2d` as torch's own: gradients, out=, the compiler, autocast; who
computes; what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels import Tile, tiles
from hetconv.sharding.conv_spec import ConvSpec
from tests import reference
from tests.interpreter import (
    DEVICE,
    ON_GPU,
    SAME,
    assert_close,
    geometry,
    images,
    multiplying_in,
    tensors,
)

SPEC = images(8, 12, (6, 5), 3, 3, (1, 1), SAME, dtype="float32")
TILE = Tile("pointer", 16, 64, 16, 4, 2)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing tuned, nothing set, float32 exact."""
    monkeypatch.setattr(tiles.tuned, "_installed", {})
    with multiplying_in("ieee"):
        yield
    kernels.set_backend("auto")


def gradients(y: Tensor, g: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, of, g)


def leaves(
    spec: ConvSpec = SPEC, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w, b, g = tensors(spec, seed)
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), g


@pytest.mark.parametrize("backend", ["triton", "aten", "auto"])
@pytest.mark.parametrize("last", [True, False])
def test_values_and_gradients(backend: Any, last: bool) -> None:
    x, w, b, g = leaves()
    if not last:
        x, w = (t.detach().contiguous().requires_grad_() for t in (x, w))
    y = kernels.conv2d(x, w, b, 1, SAME, backend=backend)
    truth = [t.detach().double().cpu().requires_grad_() for t in (x, w, b)]
    expected = reference.conv2d(*truth, *geometry(SPEC))
    assert_close(y, expected.detach(), 1e-5)
    found = zip(
        gradients(y, g, x, w, b),
        gradients(expected, g.double().cpu(), *truth),
        (x, w, b),
        strict=True,
    )
    for mine, theirs, like in found:
        assert_close(mine, theirs, 1e-5)
        assert mine.stride() == like.stride()


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_gradients_only_where_wanted(
    wanted: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[bool]] = []
    halves = kernels.dispatch.backward_2d

    def recorded(*args: Any, **kwargs: Any) -> Any:
        asked.append(list(args[-2]))
        return halves(*args, **kwargs)

    monkeypatch.setattr(kernels.conv2d_op, "backward_2d", recorded)
    *inputs, g = leaves()
    for t, want in zip(inputs, wanted, strict=True):
        t.requires_grad_(want)
    kernels.conv2d(*inputs, padding=1, backend="triton").backward(g)
    assert asked == [list(wanted)]
    assert [t.grad is not None for t in inputs] == list(wanted)


def test_a_gradient_that_is_one_number_everywhere() -> None:
    x, w, b, _ = leaves()
    kernels.conv2d(x, w, b, padding=1, backend="triton").sum().backward()
    assert x.grad is not None
    expected = gradients(
        F.conv2d(x, w, b, padding=1).sum(), torch.ones((), device=DEVICE), x
    )[0]
    assert_close(x.grad, expected.double().cpu(), 1e-5)


def test_second_derivatives_are_refused() -> None:
    x, w, b, g = leaves()
    (dx,) = torch.autograd.grad(
        kernels.conv2d(x, w, b, padding=1, backend="triton"), x, g, create_graph=True
    )
    with pytest.raises(
        RuntimeError, match=r"hetconv.conv2d_backward.* no autograd formula"
    ):
        dx.sum().backward()


def test_nothing_is_recorded_without_gradients() -> None:
    x, w, b, _ = leaves()
    with torch.no_grad():
        assert not kernels.conv2d(x, w, b, padding=1, backend="triton").requires_grad


PADDINGS: dict[str, tuple[Any, Any]] = {
    "a number": (2, 2),
    "a pair": ((2, 1), (2, 1)),
    "one in a list": ([1], 1),
    "valid": ("valid", "valid"),
    "same": ("same", "same"),
    "per side": (((2, 2), (0, 0)), (2, 0)),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_paddings_as_torch_says_them(name: str) -> None:
    mine, theirs = PADDINGS[name]
    x, w, b, _ = tensors(SPEC)
    expected = F.conv2d(x, w, b, padding=theirs)
    assert_close(
        kernels.conv2d(x, w, b, padding=mine, backend="triton"),
        expected.double().cpu(),
        1e-5,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel"
)  # torch's own, that it copies
def test_the_samples_that_torch_tests_itself_with() -> None:
    """Those with a batch; one without is refused, as every one that no kernel takes."""
    pytest.importorskip("expecttest", reason="torch's own test cases import it")
    from torch.testing._internal.common_methods_invocations import op_db

    (entry,) = (op for op in op_db if op.name == "nn.functional.conv2d")
    for sample in entry.sample_inputs(DEVICE, torch.float32, requires_grad=True):
        x, (w, b, *rest), options = sample.input, sample.args, sample.kwargs
        if x.dim() == 3:
            with pytest.raises(KernelError, match=r"takes x \(N, C, H, W\)"):
                kernels.conv2d(x, w, b, *rest, **options, backend="triton")
            continue
        y = kernels.conv2d(x, w, b, *rest, **options, backend="triton")
        expected = F.conv2d(x, w, b, *rest, **options)
        of = [t for t in (x, w, b) if t is not None]
        g = torch.randn(y.shape, device=DEVICE)
        pairs = zip(
            (y, *gradients(y, g, *of)),
            (expected, *gradients(expected, g, *of)),
            strict=True,
        )
        for mine, theirs in pairs:
            assert_close(mine, theirs.detach().double().cpu(), 1e-5)


LAYOUTS = {
    "NCHW": torch.contiguous_format,
    "NHWC": torch.channels_last,
}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # opcheck's, 2.14
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_the_operator_keeps_torchs_rules(
    layout: str, biased: bool, backend: str
) -> None:
    spec = images(8, 8, (5, 4), 2, 2, (2, 1), ((0, 1), (1, 1)), dtype="float32")
    x, w, b, g = (
        t.contiguous(memory_format=LAYOUTS[layout]) if t.dim() == 4 else t
        for t in (t.detach() for t in leaves(spec))
    )
    rest = ([2, 1], [0, 1, 1, 1], [1, 1], 1, backend, "")
    inputs = [
        t.requires_grad_() if t is not None else None
        for t in (x, w, b if biased else None)
    ]
    torch.library.opcheck(torch.ops.hetconv.conv2d.default, (*inputs, *rest))
    backward = (g, x.detach(), w.detach(), [True, True, biased], *rest)
    torch.library.opcheck(torch.ops.hetconv.conv2d_backward.default, backward)


@pytest.mark.parametrize("backend", ["triton", "aten", "auto"])
def test_compiled_whole_it_is_one_node(backend: Any) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def model(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return kernels.conv2d(x.relu(), w, b, padding=1, backend=backend).relu()

    x, w, b, g = leaves()
    torch._dynamo.reset()
    y = torch.compile(
        model, fullgraph=True, backend=aot_autograd(fw_compiler=kept, bw_compiler=kept)
    )(x, w, b)
    expected = model(x, w, b)
    assert y.equal(expected)
    for mine, theirs in zip(
        gradients(y, g, x, w, b), gradients(expected, g, x, w, b), strict=True
    ):
        assert mine.equal(theirs)
    calls = [
        [n.target for n in graph.graph.nodes if "hetconv" in str(n.target)]
        for graph in graphs
    ]
    assert calls == [
        [torch.ops.hetconv.conv2d.default],
        [torch.ops.hetconv.conv2d_backward.default],
    ]


def test_compiled_by_the_name_of_a_backend() -> None:
    x, w, b, _ = tensors(SPEC)
    torch._dynamo.reset()
    compiled = torch.compile(kernels.conv2d, fullgraph=True, backend="aot_eager")
    assert compiled(x, w, b, backend="triton", tile=TILE).equal(
        kernels.conv2d(x, w, b, backend="triton", tile=TILE)
    )


@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_autocast(backend: Any) -> None:
    x, w, b, g = leaves()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = kernels.conv2d(x, w, b, padding=1, backend=backend)
    assert y.dtype == torch.bfloat16
    found = gradients(y, g.bfloat16(), x, w, b)
    truth = [t.detach().double().cpu().requires_grad_() for t in (x, w, b)]
    expected = reference.conv2d(*truth, *geometry(SPEC))
    assert_close(y, expected.detach(), 1e-2)
    for mine, theirs in zip(
        found, gradients(expected, g.double().cpu(), *truth), strict=True
    ):
        assert mine.dtype == torch.float32
        assert_close(mine, theirs, 1e-2)


def test_autocast_leaves_float64_alone() -> None:
    x, w, b, _ = tensors(replace(SPEC, dtype="float64"))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert kernels.conv2d(x, w, b).dtype == torch.float64


@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_a_result_in_a_slot(backend: Any) -> None:
    x, w, b, _ = tensors(SPEC)
    whole = torch.full((2, 30, 8, 5), torch.nan, device=DEVICE).contiguous(
        memory_format=torch.channels_last
    )
    slot = whole[:, 8:20, 1:7]
    assert kernels.conv2d(x, w, b, padding=1, out=slot, backend=backend) is slot
    assert slot.equal(kernels.conv2d(x, w, b, padding=1, backend=backend))
    assert whole.isfinite().sum() == slot.numel()


def out(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = DEVICE
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).contiguous(
        memory_format=torch.channels_last
    )


OUTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "shape": (
        lambda: out(2, 11, 6, 5),
        r"out is \(2, 11, 6, 5\) .* must be \(2, 12, 6, 5\)",
    ),
    "dtype": (
        lambda: out(2, 12, 6, 5, dtype=torch.float16),
        r"out is .* torch.float16 .* torch.float32",
    ),
    "device": (
        lambda: out(2, 12, 6, 5, device="meta"),
        r"out is .* on meta, but must be .* on c",
    ),
    "strides": (
        lambda: torch.empty(2, 12, 6, 5, device=DEVICE),
        r"strides \(360, 30, 5, 1\), but its channels must",
    ),
    "gradient": (
        lambda: out(2, 12, 6, 5).requires_grad_(),
        r"out= is not differentiable.*no_grad",
    ),
}


@pytest.mark.parametrize("name", OUTS)
def test_a_slot_that_does_not_fit_is_refused(name: str) -> None:
    make, match = OUTS[name]
    x, w, b, _ = tensors(SPEC)
    with pytest.raises(KernelError, match=match):
        kernels.conv2d(x, w, b, padding=1, out=make(), backend="triton")


def test_a_slot_takes_no_inputs_that_want_gradients() -> None:
    x, w, b, g = leaves()
    with pytest.raises(KernelError, match="out= is not differentiable"):
        kernels.conv2d(x, w, b, padding=1, out=g, backend="triton")
    with torch.no_grad():
        kernels.conv2d(x, w, b, padding=1, out=g, backend="triton")


@pytest.mark.parametrize("entry", [TILE, "aten"])
def test_each_pass_is_computed_by_whom_the_table_says(
    entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the table knows the input gradient alone; the other gradients are ATen's."""
    asked: list[Any] = []
    by_aten = kernels.dispatch.aten.backward

    def recorded(*args: Any) -> Any:
        asked.append(args[-1])
        return by_aten(*args)

    monkeypatch.setattr(kernels.dispatch.aten, "backward", recorded)
    name = torch.cuda.get_device_name(DEVICE) if ON_GPU else "cpu"
    tiles.install({("input gradient", SPEC, "ieee"): entry}, name)
    x, w, _, g = tensors(SPEC)
    found = kernels.conv2d_backward(g, x, w, *geometry(SPEC))
    assert asked == [(entry == "aten", True, entry == "aten")]
    expected = kernels.conv2d_backward(g, x, w, *geometry(SPEC), backend="aten")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert_close(mine, theirs.double().cpu(), 1e-5)
