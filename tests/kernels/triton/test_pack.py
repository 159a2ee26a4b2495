"""`kernels.pack` and `kernels.unpack` are torch's copies and sums, bit by bit, of boxes
that lie anyhow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetconv import kernels
from hetconv.kernels.launch import Launch, StridedLayout
from hetconv.kernels.triton import pack
from hetconv.sharding.layout import Box
from tests.interpreter import DEVICE, ON_GPU
from tests.strategies import boxes

pytestmark = [
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.filterwarnings(
        "ignore:overflow encountered in"
    ),  # numpy's, which interprets
]
EXAMPLES = 10 if ON_GPU else 150  # a GPU's compiler takes seconds for each
BITS = {2: torch.int16, 4: torch.int32}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BACKENDS = ["triton", "aten", "auto"]
Shape = tuple[int, int, int, int]


@pytest.fixture(scope="module", autouse=True)
def _bfloat16_is_rounded() -> Iterator[None]:
    """Triton's interpreter (3.7) cuts float32 to bfloat16 off, and makes 0 of what is
    denormal in either.
    """
    if ON_GPU:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        match x.dtype.scalar, to.scalar:
            case tl.bfloat16, tl.float32:
                return TensorHandle(
                    (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32
                )
            case tl.float32, tl.bfloat16:
                rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
                return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, x, to)

    InterpreterBuilder.cast_impl = cast_impl
    yield
    InterpreterBuilder.cast_impl = cast


def image(
    shape: Shape, dtype: torch.dtype, seed: int = 0, finite: bool = False
) -> Tensor:
    """Random bits in channels_last: NaN with any payload, denormals, -0; or with 0 for
    what is not ``finite``.
    """
    N, C, H, W = shape
    random = torch.Generator().manual_seed(seed)
    most = 2 ** (8 * dtype.itemsize - 1)
    t = torch.randint(
        -most, most, (N, H, W, C), generator=random, dtype=BITS[dtype.itemsize]
    ).view(dtype)
    t = torch.where(t.isfinite(), t, 0) if finite else t
    return t.to(DEVICE).permute(0, 3, 1, 2)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = BITS[a.element_size()]
    return a.dtype == b.dtype and a.contiguous().view(bits).equal(
        b.contiguous().view(bits)
    )


shapes: st.SearchStrategy[Shape] = st.tuples(
    st.integers(1, 3),
    st.sampled_from([1, 3, 8, 16]),
    st.integers(1, 5),
    st.integers(1, 5),
)


class Cut(NamedTuple):
    """Boxes of an image of that shape."""

    shape: Shape
    boxes: list[Box]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Disjoint ones, within slices along one dimension: whole slabs of rows or columns,
    or less; empty ones too.
    """
    shape = draw(shapes)
    dim, count, whole = (
        draw(st.integers(0, 3)),
        draw(st.integers(1, 4)),
        Box.whole(shape),
    )
    ends = sorted(
        draw(
            st.lists(st.integers(0, shape[dim]), min_size=count + 1, max_size=count + 1)
        )
    )
    slices = [whole.with_range(dim, a, b) for a, b in pairwise(ends)]
    if draw(st.booleans()):
        return Cut(shape, slices)
    inner = [draw(boxes(s.shape)) for s in slices]
    return Cut(
        shape,
        [
            Box(at(s.lo, b.lo), at(s.lo, b.hi))
            for s, b in zip(slices, inner, strict=True)
        ],
    )


def at(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def views(t: Tensor, found: list[Box]) -> list[Tensor]:
    return [t[b.slices_in(Box.whole(tuple(t.shape)))] for b in found]


def parts_for(
    found: list[Box], dtype: torch.dtype, lying: list[bool], finite: bool
) -> list[Tensor]:
    """A part for each box: as it arrives, or as a box of a larger image."""
    parts = []
    for i, (box, within) in enumerate(zip(found, lying, strict=False)):
        N, c, h, w = box.shape
        larger = (
            image((N, c + 8, h + 1, w + 2), dtype, i + 1, finite) if within else None
        )
        parts.append(
            larger[:, 8:, 1:, 1:-1]
            if larger is not None
            else image((N, c, h, w), dtype, i + 1, finite)
        )
    return parts


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(DTYPES))
@settings(max_examples=EXAMPLES)
def test_packed_is_contiguous(
    backend: Any, data: st.DataObject, shape: Shape, dtype: torch.dtype
) -> None:
    """Pieces, which may overlap, of two images; those that are copied follow on each other."""
    kernels.set_backend(backend)
    both = [image(shape, dtype, seed) for seed in (0, 1)]
    found = data.draw(
        st.lists(st.tuples(boxes(shape), st.sampled_from(both)), max_size=4)
    )
    pieces = [views(t, [box])[0] for box, t in found]
    copied = []
    for piece, wire in zip(pieces, kernels.pack(pieces), strict=True):
        expected = piece.movedim(1, -1)
        assert wire.is_contiguous()
        assert same_bits(wire, expected)
        if expected.is_contiguous():
            assert wire.data_ptr() == expected.data_ptr()
        else:
            copied.append(wire)
    assert len({w.untyped_storage().data_ptr() for w in copied}) <= 1
    assert all(
        a.data_ptr() + a.nbytes <= b.data_ptr() < a.data_ptr() + a.nbytes + 16
        for a, b in pairwise(copied)
    )
    assert all(w.data_ptr() % 16 == 0 for w in copied)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@given(
    cut=cuts(),
    dtype=st.sampled_from(DTYPES),
    lying=st.lists(st.booleans(), min_size=4, max_size=4),
)
@settings(max_examples=EXAMPLES)
def test_places_are_filled_and_nothing_else(
    backend: Any, add: bool, cut: Cut, dtype: torch.dtype, lying: list[bool]
) -> None:
    kernels.set_backend(backend)
    parts, whole = (
        parts_for(cut.boxes, dtype, lying, add),
        image(cut.shape, dtype, finite=add),
    )
    expected = whole.clone()
    for place, part in zip(views(expected, cut.boxes), parts, strict=True):
        place.add_(part) if add else place.copy_(part)
    kernels.unpack(parts, views(whole, cut.boxes), add=add)
    assert same_bits(whole, expected)


@given(
    shape=shapes,
    lo=st.integers(0, 4),
    dim=st.sampled_from([2, 3]),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=EXAMPLES)
def test_unpacked_is_what_was_packed(
    shape: Shape, lo: int, dim: int, dtype: torch.dtype
) -> None:
    kernels.set_backend("triton")
    x, lo = image(shape, dtype), min(lo, shape[dim])
    halves = x.split([lo, shape[dim] - lo], dim)
    y = torch.empty_like(x)
    kernels.unpack(
        [w.movedim(-1, 1) for w in kernels.pack(halves)],
        y.split([lo, shape[dim] - lo], dim),
    )
    assert same_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_bits_is_kept(dtype: torch.dtype) -> None:
    """By two pieces of several programs each."""
    kernels.set_backend("triton")
    x = (
        torch.arange(-(2**15), 2**15, dtype=torch.int16, device=DEVICE)
        .view(dtype)
        .view(2, 16, 128, 16)
    )
    halves = x[:, :, :7], x[:, :, 7:]
    wires = kernels.pack([t.permute(0, 3, 1, 2) for t in halves])
    assert all(same_bits(w, t) for w, t in zip(wires, halves, strict=True))


@pytest.mark.parametrize(
    ("of", "C", "unit", "sizes"),
    [
        (
            (slice(None), slice(None), slice(1, 3)),
            16,
            8,
            (2, 1, 1),
        ),  # runs of whole rows
        ((slice(None), slice(None), slice(1, 3)), 3, 8, (2, 1, 1)),
        ((..., slice(1, 3)), 16, 8, (12, 1, 1)),
        ((..., slice(1, 3)), 3, 2, (12, 1, 1)),
        ((slice(None), slice(8, 12)), 16, 4, (96, 1, 1)),
        ((..., slice(1, 3), slice(1, 3)), 16, 8, (2, 2, 1)),
        ((slice(None), slice(0, 8), slice(1, 3), slice(1, 3)), 16, 8, (2, 2, 2)),
        ((..., slice(1, 8, 2)), 16, 8, (48, 1, 1)),
        (..., 3, 8, (1, 1, 1)),
    ],
)
def test_what_lies_side_by_side_is_moved_at_once(
    of: Any, C: int, unit: int, sizes: tuple[int, ...]
) -> None:
    x = torch.empty(2, 6, 8, C, dtype=torch.float16, device="meta").permute(0, 3, 1, 2)
    y = torch.empty_like(x[of], memory_format=torch.channels_last)
    pair = StridedLayout.of(x[of]), StridedLayout.of(y)
    assert pack.move_launch((pair,), False).constants["UNITS"] == (unit,)
    dims = pack.merged_dims(*pair)
    assert sorted((d.size for d in dims[1:]), reverse=True) == list(sizes)
    assert dims[0].size * dims[1].size * dims[2].size * dims[3].size == y.numel()


SLABS = {
    "a run of 2,058 units in each sample": ((2, 8, 50, 49), 42, True),
    "of 2,009": ((2, 8, 50, 49), 41, False),
    "of 2,145 single numbers": ((3, 13, 40, 5), 33, True),
    "of 1,950": ((3, 13, 40, 5), 30, False),
    "a single run of 735": ((1, 8, 50, 49), 15, True),
}
"""Shape of an image, rows of a slab of it, and whether the slab's runs are long."""


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("name", SLABS)
def test_a_program_takes_units_of_one_run_where_runs_are_long(
    name: str, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slabs of rows of one image are filled, and nothing else."""
    (N, C, H, W), rows, long = SLABS[name]
    taken: list[Any] = []
    run = Launch.run

    def recorded(self: Launch, tensors: Any) -> None:
        taken.append(self.constants["LONG"])
        run(self, tensors)

    monkeypatch.setattr(Launch, "run", recorded)
    kernels.set_backend("triton")
    whole = image((N, C, 2 * H, W), torch.float16, 1, finite=add)
    parts = [image((N, C, rows, W), torch.float16, s, finite=add) for s in (2, 3)]
    starts = 1, H + 1
    expected = whole.clone()
    for start, part in zip(starts, parts, strict=True):
        place = expected[:, :, start : start + rows]
        place.add_(part) if add else place.copy_(part)
    places = [whole[:, :, start : start + rows] for start in starts]
    kernels.unpack(parts, places, add=add)
    assert taken == [(long, long)]
    assert same_bits(whole, expected)


def test_a_single_run_of_memory_is_copied_by_torch(launched: list[str]) -> None:
    kernels.set_backend("triton")
    whole, part = (image((1, 8, h, 4), torch.float16, h) for h in (6, 2))
    kernels.unpack([part], [whole[:, :, 1:3]])
    assert same_bits(whole[:, :, 1:3], part)
    assert launched == []
    finite = image((1, 8, 2, 4), torch.float16, 7, finite=True)
    kernels.unpack([finite], [whole[:, :, 1:3].zero_()], add=True)
    assert same_bits(whole[:, :, 1:3], finite)
    assert launched == ["move"]


@pytest.mark.parametrize(("N", "stride"), [(2, 2**31 + 16), (3, 2**30)])
@pytest.mark.parametrize("add", [False, True])
def test_boxes_beyond_32_bits(
    add: bool, N: int, stride: int, sparse: Callable[[Tensor, int], Tensor]
) -> None:
    kernels.set_backend("triton")
    part = image((N, 8, 3, 4), torch.float16, 1, finite=True)
    far = sparse(image((N, 8, 3, 4), torch.float16, finite=True), stride)
    expected = far[:, :, 1:3].contiguous()
    (wire,) = kernels.pack([far[:, :, 1:3]])
    assert same_bits(wire.movedim(-1, 1), expected)
    kernels.unpack([part[:, :, 1:3]], [far[:, :, 1:3]], add=add)
    assert same_bits(
        far[:, :, 1:3], expected + part[:, :, 1:3] if add else part[:, :, 1:3]
    )


def test_many_numbers_take_64_bits() -> None:
    """Wherever they are: a source may span few, as one that is expanded does."""
    few = StridedLayout((1, 8, 2**13, 2**12), (2**28, 1, 2**15, 8), "float16")
    one = StridedLayout((2, 8, 2**13, 2**13), (0, 1, 0, 8), "float16")
    packed = StridedLayout((2, 8, 2**13, 2**13), (2**29, 1, 2**16, 8), "float16")
    for pairs, wide in (([(few, few)], False), ([(few, few), (one, packed)], True)):
        assert pack.move_launch(pairs, False).constants["INT64"] == wide
