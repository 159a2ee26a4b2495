"""The kernel of `kernels.conv2d_parts`: a convolution of the parts' concatenation that
reads each where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetconv import kernels
from hetconv.kernels import Tile, tiles
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.epilogue import ACTIVATIONS
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.triton import conv2d_parts
from hetconv.kernels.triton.implicit_gemm import implicit_gemm_pointers
from hetconv.sharding.conv_spec import ITEMSIZE, ConvSpec
from tests.interpreter import (
    BOUNDS,
    DEVICE,
    ON_GPU,
    POINTER,
    SAME,
    Tensors,
    assert_close,
    geometry,
    images,
    tensors,
)
from tests.kernels.test_epilogue import definition, ends
from tests.strategies import convolutions, sizes

from .test_strided_tensors import LAYOUTS, placed

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
DTYPES = ("float32", "float16", "bfloat16")
EXAMPLES = 8 if ON_GPU else 24  # each of which a GPU's compiler takes seconds for
SPEC = images(24, 40, (6, 5), 3, 3, (1, 1), SAME)
ODD = images(23, 9, (9, 11), 4, 2, (2, 3), ((1, 2), (3, 0)), (2, 1), dtype="bfloat16")
WIDTHS = {SPEC: (8, 0, 16), ODD: (3, 0, 19, 1)}
ENDS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "scale": ("scale",),
    "shift": ("shift",),
    "residual": ("residual",),
    "all": ("scale", "shift", "residual"),
}


@contextmanager
def launching() -> Iterator[list[tuple[Any, dict[str, Tensor]]]]:
    """The kernels that are launched within, each with its tensors."""
    seen: list[tuple[Any, dict[str, Tensor]]] = []
    run = Launch.run

    def recorded(self: Launch, tensors: dict[str, Tensor]) -> None:
        seen.append((self.kernel, tensors))
        run(self, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", recorded)
        yield seen


def separate(x: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    return [
        p.clone(memory_format=torch.channels_last) for p in x.split(list(widths), 1)
    ]


def slices(x: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    return list(placed(x, {1: (3, 1, 2)}).split(list(widths), 1))


def views_of_a_flat_buffer(x: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    """As they are received: one part's image after the other's."""
    N, _, H, W = x.shape
    flat = torch.cat(
        [p.permute(0, 2, 3, 1).flatten() for p in x.split(list(widths), 1)]
    )
    found = zip(flat.split([N * H * W * k for k in widths]), widths, strict=True)
    return [v.view(N, H, W, k).permute(0, 3, 1, 2) for v, k in found]


LYING: dict[str, Callable[[Tensor, tuple[int, ...]], list[Tensor]]] = {
    "separate": separate,
    "slices": slices,
    "views of a flat buffer": views_of_a_flat_buffer,
}


class Problem(NamedTuple):
    """A convolution of parts, of ``widths``, that lie one way or another; what is done
    to its sums.
    """

    spec: ConvSpec
    widths: tuple[int, ...]
    lying: str = "separate"
    ends: tuple[str, ...] = ()
    bias: bool = True
    activation: str | None = None


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Of any geometry and up to four parts, of single channels or of blocks of 16
    bytes, empty ones among them.
    """
    aligned = draw(st.booleans())
    spec = draw(convolutions(DTYPES, st.integers(1, 3), aligned=aligned))
    spec, unit = replace(spec, groups=1), 8 if aligned else 1
    widths = draw(sizes(spec.C // unit, draw(st.integers(1, 4))))
    return Problem(
        spec,
        tuple(unit * n for n in widths),
        draw(st.sampled_from(list(LYING))),
        draw(st.sampled_from(list(ENDS.values()))),
        draw(st.booleans()),
        draw(st.sampled_from([None, "leaky_relu"])),
    )


def called(
    spec: ConvSpec, parts: list[Tensor], t: Tensors, bias: bool = True, **how: Any
) -> Tensor:
    given: dict[str, Any] = {"backend": "triton", "slope": 0.1} | how
    return kernels.conv2d_parts(
        parts, t.w, t.bias if bias else None, *geometry(spec)[:3], **given
    )


def assert_right(p: Problem, t: Tensors, parts: list[Tensor], **how: Any) -> None:
    added = {name: ends(p.spec)[name] for name in p.ends}
    found = called(p.spec, parts, t, p.bias, activation=p.activation, **added, **how)
    assert found.dtype == t.x.dtype
    expected = definition(p.spec, t, p.bias, p.activation, **added)
    assert_close(
        found,
        expected,
        BOUNDS["tf32" if ON_GPU and p.spec.dtype == "float32" else p.spec.dtype],
    )


@given(p=problems(), seed=st.integers(0, 2**32), tile=st.sampled_from([POINTER, None]))
@settings(max_examples=EXAMPLES)
def test_it_is_the_convolution_of_the_concatenation(
    p: Problem, seed: int, tile: Tile | None
) -> None:
    t = tensors(p.spec, seed)
    assert_right(p, t, LYING[p.lying](t.x, p.widths), tile=tile)


@pytest.mark.parametrize("names", ENDS.values(), ids=list(ENDS))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spec", WIDTHS, ids=["3x3", "odd"])
def test_each_end(spec: ConvSpec, bias: bool, names: tuple[str, ...]) -> None:
    p, t = Problem(spec, WIDTHS[spec], "separate", names, bias, "relu"), tensors(spec)
    assert_right(p, t, separate(t.x, p.widths), tile=POINTER)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation(activation: str) -> None:
    p, t = (
        Problem(SPEC, WIDTHS[SPEC], "separate", ENDS["all"], True, activation),
        tensors(SPEC),
    )
    assert_right(p, t, separate(t.x, p.widths), tile=POINTER)


def test_scale_and_shift_lie_anyhow() -> None:
    t, added = tensors(SPEC), ends(SPEC)
    added["scale"] = torch.full((), 0.5, device=DEVICE).expand(SPEC.K)
    added["shift"] = torch.stack((added["shift"], added["shift"] * torch.nan), 1)[:, 0]
    y = called(SPEC, separate(t.x, WIDTHS[SPEC]), t, False, tile=POINTER, **added)
    assert_close(y, definition(SPEC, t, False, None, **added), BOUNDS["float16"])


@pytest.mark.parametrize("spec", WIDTHS, ids=["3x3", "odd"])
def test_it_is_one_launch(spec: ConvSpec) -> None:
    t = tensors(spec)
    with launching() as launched:
        called(
            spec, separate(t.x, WIDTHS[spec]), t, True, activation="silu", **ends(spec)
        )
    assert [kernel for kernel, _ in launched] == [conv2d_parts.implicit_gemm_parts]


@pytest.mark.parametrize("lying", LYING)
def test_parts_are_not_copied(lying: str) -> None:
    """Where their channels lie beside each other."""
    t = tensors(SPEC)
    parts = LYING[lying](t.x, WIDTHS[SPEC])
    with launching() as launched:
        called(SPEC, parts, t, tile=POINTER)
    ((_, read),) = launched
    assert [read[f"x{i}"].data_ptr() for i in range(2)] == [
        p.data_ptr() for p in parts if p.shape[1]
    ]


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        images(40, 9, (5, 33), 1, 31, (1, 1), ((0, 0), (15, 15))),
        images(8, 9, (6, 9), 4, 8, dtype="float32"),
    ],
    ids=["3x3", "31 taps", "32 taps"],
)
def test_one_part_has_the_bits_of_one_tensor(spec: ConvSpec) -> None:
    t = tensors(spec)
    with launching() as launched:
        whole = kernels.conv2d_forward(
            t.x, t.w, t.bias, *geometry(spec), tile=POINTER, backend="triton"
        )
        assert called(spec, [t.x], t, tile=POINTER).equal(whole)
        assert called(spec, [t.x, t.x[:, :0]], t, tile=POINTER).equal(whole)
    assert [kernel for kernel, _ in launched] == [
        implicit_gemm_pointers,
        *[conv2d_parts.implicit_gemm_parts] * 2,
    ]


@pytest.mark.parametrize("spec", WIDTHS, ids=["3x3", "odd"])
def test_the_same_bits_every_time_wherever_parts_lie(spec: ConvSpec) -> None:
    t = tensors(spec)
    found = [
        called(spec, lying(t.x, WIDTHS[spec]), t, tile=POINTER)
        for lying in (*LYING.values(), separate)
    ]
    assert all(y.equal(found[0]) for y in found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "spec", [SPEC, images(24, 40, (6, 5), 1, 1, (2, 1))], ids=["3x3", "1x1"]
)
def test_tensors_lie_anyhow(spec: ConvSpec, layout: str) -> None:
    """Each of them: a part, the residual, the filters."""
    t, lie = tensors(spec), LAYOUTS[layout]
    first, second = separate(t.x, (8, 16))
    first = lie(first)
    t = t._replace(x=torch.cat([first, second], 1), w=lie(t.w))
    residual = lie(ends(spec)["residual"])
    y = called(spec, [first, second], t, tile=POINTER, residual=residual)
    assert_close(
        y, definition(spec, t, True, None, residual=residual), BOUNDS["float16"]
    )


def test_sixteen_parts() -> None:
    spec = images(36, 9, (4, 4), 1, 1)
    t = tensors(spec)
    assert_right(
        Problem(spec, ()), t, separate(t.x, (*range(9), *[0] * 7)), tile=POINTER
    )


FAR = [(2, 2**31 + 16), (3, 2**30)]


@pytest.mark.parametrize(("N", "stride"), FAR)
@pytest.mark.parametrize("name", ["first part", "second part", "residual"])
def test_inputs_beyond_32_bits(
    name: str, N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    spec = replace(images(24, 16, (3, 4), 2, 1), N=N)
    t = tensors(spec)
    first, second = separate(t.x, (8, 16))
    residual = ends(spec)["residual"]
    match name:
        case "first part":
            first = sparse(first, stride)
        case "second part":
            second = sparse(second, stride)
        case _:
            residual = sparse(residual, stride)
    y = called(spec, [first, second], t, tile=POINTER, residual=residual)
    assert_close(
        y, definition(spec, t, True, None, residual=residual), BOUNDS["float16"]
    )


@pytest.mark.parametrize(("N", "stride"), FAR)
def test_an_output_beyond_32_bits(
    N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    spec = replace(images(24, 16, (3, 4), 2, 1), N=N)
    t = tensors(spec)
    slot, parts = sparse(t.g, stride).fill_(torch.nan), separate(t.x, (8, 16))
    called(spec, parts, t, out=slot, tile=POINTER)
    assert slot.equal(called(spec, parts, t, tile=POINTER))


def launch(
    widths: tuple[int, ...], tile: Tile = POINTER, dtype: str = "float16"
) -> Launch:
    """Of packed parts."""
    spec = images(sum(widths), 40, (6, 5), 3, 3, (1, 1), SAME, dtype=dtype)
    shapes = [(2, k, 6, 5) for k in widths] + [spec.w_shape, spec.y_shape]
    *parts, w, y = (StridedLayout.packed(s, dtype) for s in shapes)
    gemm = conv2d_parts.forward(spec, tuple(parts), w, y, "ieee")
    return conv2d_parts.launches(gemm, tile).launches[0]


def test_a_part_without_channels_is_not_walked() -> None:
    few, more = launch((8, 16)), launch((0, 8, 0, 16, 0))
    assert (few.scalars, few.constants) == (more.scalars, more.constants)
    assert few.constants["FIRST"] == (0, 8)
    assert more.tensors["x"] == ("x0", "x1")


def test_odd_parts_cost_no_one_else_wide_accesses() -> None:
    assert launch((3, 16, 12)).constants["X_UNIT"] == (1, 8, 4)


WORK = conv2d_parts.MultiInputShape(
    256, 2**16, 256, 9, 1, "float16", (1, 1, 2**16), widths=(96, 160)
)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda c: str(c.arch))
@given(
    widths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    m=st.integers(1, 512),
    ieee=st.booleans(),
)
@settings(max_examples=20)
def test_the_default_tile(
    chip: Any, dtype: str, widths: list[int], m: int, ieee: bool
) -> None:
    """Its stages fill shared memory; deeper steps would pad the parts more, or without
    tensor cores take registers.
    """
    ieee = ieee and dtype == "float32"
    work = replace(
        WORK, m=m, channels=sum(widths), widths=tuple(widths), dtype=dtype, ieee=ieee
    )
    tile = conv2d_parts.default_tile(work, chip)
    assert (tile.kind, tile.split_k) == ("pointer", 1)
    most = {v[:3]: v[3] for v in tiles.TILE_SHAPES["pointer"]}[
        tile.m, tile.n, tile.warps
    ]
    assert tile.stages == most or not tiles.fits(
        replace(tile, stages=tile.stages + 1), work, chip
    )
    assert work.steps(tile) == 9 * sum(-(-C // tile.k) for C in widths)
    if ieee:
        assert (tile.m, tile.n, tile.k) in ((128, 128, 16), (64, 32, 16), (32, 64, 16))
    else:
        deeper = [k for k in (32, 64) if tile.k < k <= 128 // ITEMSIZE[dtype]]
        assert all(work.steps_of(k) * k > work.steps(tile) * tile.k for k in deeper)


def test_narrow_parts_are_not_read_in_wide_steps() -> None:
    assert (
        conv2d_parts.default_tile(replace(WORK, widths=(16,) * 16), CHIPS[80]).k == 16
    )
    assert conv2d_parts.default_tile(replace(WORK, widths=(64,) * 4), CHIPS[80]).k == 64
