"""`kernels.concat_channels` is its definition: values, gradients, adjoint; whatever
lies where; one launch each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetconv import kernels
from hetconv.kernels.epilogue import ACTIVATIONS, NO_EPILOGUE, EpilogueSpec
from hetconv.kernels.launch import (
    MIN_ELEMENTS_FOR_INT64,
    Launch,
    StridedLayout,
    with_even_pixels,
)
from hetconv.kernels.triton import concat
from tests.interpreter import BOUNDS, DEVICE, ON_GPU, assert_close
from tests.strategies import Join, joins

from .test_strided_tensors import LAYOUTS, PLACES, Margins, placed

pytestmark = [
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.filterwarnings(
        "ignore:.* encountered in"
    ),  # numpy's, which interprets, at infinities
]
EXAMPLES = 5 if ON_GPU else 20  # each of which a GPU's compiler takes seconds for
SLOPE = 0.2
FULL = Join((2, 3, 4), (16, 8, 24), "float16", True, True, "silu")
ODD = Join((2, 3, 4), (3, 0, 8, 1), "bfloat16", True, True, "relu")
WIDE = FULL._replace(sizes=(96, 0, 160))
WIDE_ODD = ODD._replace(sizes=(131, 0, 77, 1))
FORMS = {"aligned": FULL, "odd": ODD, "wide": WIDE, "wide and odd": WIDE_ODD}
"""Parts that are narrow, whose rows are joined, and wide, which are flat."""


class Given(NamedTuple):
    """Arguments, and a cotangent ``g`` of the result."""

    parts: list[Tensor]
    scale: Tensor | None
    shift: Tensor | None
    residual: Tensor | None
    activation: str | None
    g: Tensor


def drawn(j: Join, seed: int = 0) -> Given:
    """Random ones in channels_last."""
    random = torch.Generator().manual_seed(seed)
    (N, P, Q), K = j.image, sum(j.sizes)

    def image(k: int) -> Tensor:
        t = torch.randn(N, P, Q, k, generator=random).to(
            DEVICE, getattr(torch, j.dtype)
        )
        return t.permute(0, 3, 1, 2)

    scale, shift = (
        torch.randn(K, generator=random).to(DEVICE) if j.scaled else None
        for _ in range(2)
    )
    return Given(
        [image(k) for k in j.sizes],
        scale,
        shift,
        image(K) if j.added else None,
        j.activation,
        image(K),
    )


def options(t: Given) -> dict[str, Any]:
    return {
        "scale": t.scale,
        "shift": t.shift,
        "residual": t.residual,
        "activation": t.activation,
        "slope": SLOPE,
    }


def called(t: Given, backend: Any = "triton") -> list[Tensor]:
    """The result, then the gradients of parts and residual under g."""
    t = t._replace(parts=[p.detach().requires_grad_() for p in t.parts])
    t = t._replace(
        residual=t.residual.detach().requires_grad_()
        if t.residual is not None
        else None
    )
    y = kernels.concat_channels(t.parts, **options(t), backend=backend)
    return [
        y.detach(),
        *torch.autograd.grad(
            y, [*t.parts, *([t.residual] if t.residual is not None else [])], t.g
        ),
    ]


def truth(t: Given) -> list[Tensor]:
    """The same by the definition, in float64 on the CPU."""
    parts = [p.detach().double().cpu().requires_grad_() for p in t.parts]
    residual = (
        t.residual.detach().double().cpu().requires_grad_()
        if t.residual is not None
        else None
    )
    z = torch.cat(parts, 1)
    if t.scale is not None and t.shift is not None:
        z = z * t.scale.double().cpu().view(-1, 1, 1) + t.shift.double().cpu().view(
            -1, 1, 1
        )
    z = z + residual if residual is not None else z
    activations: dict[str | None, Callable[[Tensor], Tensor]] = {
        None: lambda z: z,
        "relu": F.relu,
        "relu6": F.relu6,
        "silu": F.silu,
        "gelu": F.gelu,
        "leaky_relu": lambda z: F.leaky_relu(z, SLOPE),
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    }
    y = activations[t.activation](z)
    of = [*parts, *([residual] if residual is not None else [])]
    return [y.detach(), *torch.autograd.grad(y, of, t.g.double().cpu())]


def assert_right(t: Given, backend: Any = "triton") -> None:
    for found, expected in zip(called(t, backend), truth(t), strict=True):
        assert found.dtype == t.g.dtype
        assert_close(found, expected, BOUNDS[str(t.g.dtype)[6:]])


@pytest.mark.parametrize("backend", ["triton", "aten", "auto"])
@given(j=joins(), seed=st.integers(0, 99))
@settings(max_examples=EXAMPLES)
def test_values_and_gradients_are_the_definitions(
    backend: str, j: Join, seed: int
) -> None:
    t = drawn(j, seed)
    assert_right(t, backend)
    y = kernels.concat_channels(t.parts, **options(t), backend=backend)  # type: ignore[arg-type]
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_nan_and_infinities_go_where_torchs_go(activation: str | None) -> None:
    """Each with each as cotangent. Of relu6's gradient at NaN torch's kernels for CPU
    and CUDA think differently.
    """
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 6.0, -1.5, 2.5, 7.5])
    x, g = (
        v.reshape(1, 8, 1, 8).to(DEVICE).contiguous()
        for v in torch.meshgrid(odd, odd, indexing="ij")
    )
    x, g = (x, g) if activation != "relu6" else (x[:, 1:], g[:, 1:])
    t = Given([x[:, :3], x[:, 3:]], None, None, None, activation, g)
    for found, expected in zip(called(t), truth(t), strict=True):
        torch.testing.assert_close(
            found.double().cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True
        )


@given(j=joins(), seed=st.integers(0, 99))
@settings(max_examples=EXAMPLES // 2)
def test_without_an_activation_backward_is_the_adjoint(j: Join, seed: int) -> None:
    """⟨Fx, y⟩ = ⟨x, F*y⟩ for parts and residual, up to rounding in float32."""
    t = drawn(j._replace(dtype="float32", activation=None), seed)
    t = t._replace(shift=torch.zeros_like(t.shift)) if t.shift is not None else t
    y, *gradients = (v.double() for v in called(t))
    inputs = [*t.parts, *([t.residual] if t.residual is not None else [])]
    right = sum((x.double() * d).sum() for x, d in zip(inputs, gradients, strict=True))
    assert (
        abs((y * t.g.double()).sum() - right) <= 1e-6 * y.norm() * t.g.double().norm()
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [(16, 8), (3, 0, 8, 1), (96, 0, 160), (131, 77, 1)], ids=str
)
def test_a_plain_concatenation_copies_bits(sizes: tuple[int, ...], dtype: str) -> None:
    """-0 and the smallest numbers too; back as well."""
    t = drawn(Join((2, 3, 4), sizes, dtype))
    for v in (*t.parts, t.g):
        v[1].mul_(0)  # half of them are -0
        if v.numel():
            v[0, 0] = torch.finfo(v.dtype).smallest_normal / 4
    bits = torch.int32 if dtype == "float32" else torch.int16
    y, *gradients = called(t)
    expected = [torch.cat(t.parts, 1), *torch.split(t.g, list(sizes), 1)]
    for mine, theirs in zip((y, *gradients), expected, strict=True):
        assert mine.contiguous().view(bits).equal(theirs.contiguous().view(bits))


@pytest.mark.parametrize("j", FORMS.values(), ids=list(FORMS))
def test_the_same_bits_twice(j: Join) -> None:
    t = drawn(j)
    assert all(a.equal(b) for a, b in zip(called(t), called(t), strict=True))


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("j", FORMS.values(), ids=list(FORMS))
def test_it_is_one_launch_each_way(
    j: Join, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    run = Launch.run

    def recorded(self: Launch, tensors: Any) -> None:
        launched.append(self.kernel)
        run(self, tensors)

    monkeypatch.setattr(Launch, "run", recorded)
    called(drawn(j._replace(activation=activation)))
    assert launched == [concat.concat, concat.split]


IMAGES = [(2, 3, 4), (2, 3, 1), (3, 1, 1), (1, 1, 4), (1, 1, 1)]


FEW = ("channels", "channels off the grid", "samples")
LYING = [
    *((IMAGES[0], layout) for layout in LAYOUTS),
    *((image, layout) for image in IMAGES[1:] for layout in FEW),
]


@pytest.mark.parametrize(("image", "layout"), LYING, ids=str)
def test_tensors_lie_anyhow(image: tuple[int, int, int], layout: str) -> None:
    """Each of them: a part, the residual, the cotangent."""
    for j in FORMS.values():
        t = drawn(j._replace(image=image))
        assert t.residual is not None
        lie = LAYOUTS[layout]
        assert_right(t._replace(parts=[lie(t.parts[0]), *t.parts[1:]]))
        assert_right(t._replace(residual=lie(t.residual), g=lie(t.g)))


def test_slices_of_channels_are_read_where_they_lie() -> None:
    for image in IMAGES:
        t = placed(drawn(Join(image, (16,))).parts[0], {1: (8, 1, 3)})
        assert with_even_pixels(t) is t


def test_a_cotangent_that_is_one_number_everywhere() -> None:
    for j in (ODD, WIDE):
        t = drawn(j)
        one = torch.ones((), dtype=t.g.dtype, device=DEVICE)
        assert_right(t._replace(g=one.expand(t.g.shape)))


def test_scale_and_shift_lie_anyhow() -> None:
    t = drawn(FULL)
    assert t.shift is not None
    every_second = torch.stack((t.shift, t.shift * torch.nan), 1)[:, 0]
    assert_right(
        t._replace(
            scale=torch.full((), 0.5, device=DEVICE).expand(48), shift=every_second
        )
    )


@given(j=joins(), seed=st.integers(0, 99), backend=st.sampled_from(["triton", "aten"]))
@settings(max_examples=EXAMPLES // 2)
def test_a_flat_buffer_is_its_parts(j: Join, seed: int, backend: Any) -> None:
    """And so are its views, which begin at any address."""
    t = drawn(j, seed)
    flat = torch.cat(
        [p.permute(0, 2, 3, 1).flatten() for p in t.parts]
    ).requires_grad_()
    y = kernels.concat_channels(
        flat, j.sizes, image=j.image, **options(t), backend=backend
    )
    (gradient,) = torch.autograd.grad(y, flat, t.g)
    expected, *gradients = called(t, backend)
    assert y.equal(expected)
    packed = [d.permute(0, 2, 3, 1).flatten() for d in gradients[: len(j.sizes)]]
    assert gradient.equal(torch.cat(packed))


@pytest.mark.parametrize("margins", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("j", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_a_result_fills_its_slot_and_nothing_else(
    backend: Any, j: Join, margins: Margins
) -> None:
    t = drawn(j)
    slot = placed(t.g, margins).fill_(torch.nan)
    whole = slot._base
    assert whole is not None
    assert (
        kernels.concat_channels(t.parts, **options(t), out=slot, backend=backend)
        is slot
    )
    assert slot.equal(kernels.concat_channels(t.parts, **options(t), backend=backend))
    assert whole.isfinite().sum() == slot.numel()


EMPTY = {
    "no image": FULL._replace(image=(0, 3, 4)),
    "no rows": FULL._replace(image=(2, 0, 4)),
    "no channels": FULL._replace(sizes=(0, 0)),
    "one part without channels": Join((2, 3, 4), (0,)),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_nothing_at_all(backend: Any, name: str) -> None:
    t = drawn(EMPTY[name])
    assert_right(t, backend)
    assert called(t, backend)[0].numel() == 0


def test_a_part_without_channels_costs_no_wide_access() -> None:
    aligned, without = (
        StridedLayout((2, k, 3, 4), (12 * k, 1, 4 * k, max(k, 1)), "float16")
        for k in (16, 0)
    )
    launch = concat.concat_launch((aligned, without), aligned, NO_EPILOGUE)
    assert launch.constants["UNIT"] == 8


FAR = [(2, 2**31 + 16), (3, 2**30)]
# As parts, pixels that lie far apart are not copied.
PIXELS = Join((0, 1, 1), (16, 8), "float16", True, True, "relu")


@pytest.mark.parametrize(("N", "stride"), FAR)
@pytest.mark.parametrize("name", ["parts", "residual", "g"])
def test_inputs_beyond_32_bits(
    name: str, N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    for sizes in (PIXELS.sizes, WIDE.sizes):
        t = drawn(PIXELS._replace(image=(N, 1, 1), sizes=sizes))
        if name == "parts":
            changed: Any = [sparse(t.parts[0], stride), *t.parts[1:]]
        else:
            changed = sparse(getattr(t, name), stride)
        assert_right(t._replace(**{name: changed}))


@pytest.mark.parametrize(("N", "stride"), FAR)
def test_an_output_beyond_32_bits(
    N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    for j in (FULL, WIDE):
        t = drawn(j._replace(image=(N, 3, 4)))
        slot = sparse(t.g, stride).fill_(torch.nan)
        kernels.concat_channels(t.parts, **options(t), out=slot, backend="triton")
        y = kernels.concat_channels(t.parts, **options(t), backend="triton")
        assert slot.equal(y)


def test_gradients_beyond_32_bits_of_a_cotangent_that_is_expanded() -> None:
    """It spans a few numbers, but what is written of it does not."""
    part = StridedLayout(
        (2, 16, 2**12, 2**12), (2**28, 1, 2**16, 16), "float16"
    )  # 2**29 numbers
    g = StridedLayout((2, 32, 2**12, 2**12), (0, 1, 0, 0), "float16")
    assert part.span < MIN_ELEMENTS_FOR_INT64
    assert concat.split_launch(
        (part, part), g, EpilogueSpec(activation="relu")
    ).constants["INT64"]
