"""Hypothesis strategies for sizes, layouts, read regions, windows and convolutions."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from hetconv.kernels.concat import MAX_PARTS
from hetconv.kernels.epilogue import ACTIVATIONS
from hetconv.sharding.conv_spec import ConvSpec, Window
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layout import Box, Layout, ReadRegion

worlds = st.integers(1, 4)
windows = st.builds(
    Window,
    kernel=st.integers(1, 7),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    pad_lo=st.integers(0, 4),
    pad_hi=st.integers(0, 4),
)
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def weights(world: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draws proportions, of which some may be zero and one is positive."""
    return (
        st.lists(st.integers(0, 9), min_size=world, max_size=world)
        .filter(any)
        .map(tuple)
    )


@st.composite
def sizes(draw: st.DrawFn, total: int, world: int) -> tuple[int, ...]:
    """Draws a size per rank, of which some may be zero, that add up to ``total``."""
    cuts = sorted(
        draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1))
    )
    return tuple(b - a for a, b in pairwise([0, *cuts, total]))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draws a box within ``shape``, which may be empty."""
    ends = [
        sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape
    ]
    return Box(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))


@st.composite
def read_regions(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> ReadRegion:
    """Draws a region in which each rank reads any box."""
    return ReadRegion(shape, tuple(draw(boxes(shape)) for _ in range(world)))


@st.composite
def sharded(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Layout:
    """Draws a layout split along one dimension, with ranks in any order."""
    dim = draw(st.integers(0, len(shape) - 1))
    layout = Layout.sharded(shape, dim, draw(sizes(shape[dim], world)))
    return (
        Layout(shape, "sharded", tuple(draw(st.permutations(layout.boxes))))
        if draw(st.booleans())
        else layout
    )


@st.composite
def hierarchical(
    draw: st.DrawFn, shape: tuple[int, ...], world: int
) -> HierarchicalLayout:
    """Draws two nodes that are sharded along another dimension, or partial."""
    ranks = draw(st.integers(1, world - 1))
    nodes, samples = (ranks, world - ranks), draw(sizes(shape[0], 2))
    dim, partial = draw(st.integers(1, len(shape) - 1)), draw(st.booleans())

    def part(ranks: int) -> Layout:
        return (
            Layout.partial(shape, ranks)
            if partial
            else Layout.sharded(shape, dim, draw(sizes(shape[dim], ranks)))
        )

    return HierarchicalLayout.from_nodes(nodes, samples, list(map(part, nodes)))


def layouts(shape: tuple[int, ...], world: int) -> st.SearchStrategy[Layout]:
    """Draws a layout of any kind."""
    strategies: list[st.SearchStrategy[Layout]] = [
        st.just(Layout.replicated(shape, world)),
        st.just(Layout.partial(shape, world)),
        sharded(shape, world),
    ]
    if world > 2 and len(shape) > 1:
        strategies.append(hierarchical(shape, world))
    return st.one_of(*strategies)


@st.composite
def convolutions(
    draw: st.DrawFn,
    dtypes: tuple[str, ...],
    strides: st.SearchStrategy[int],
    *,
    aligned: bool = False,
) -> ConvSpec:
    """Draws a small 2-D convolution of any geometry.

    Args:
        draw: Hypothesis' function.
        dtypes: The data types to choose from.
        strides: Strategy of the strides.
        aligned: Whether channels fill 16 bytes, or are multiples of 32 in a group.
    """
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    unit = (32 if groups > 1 else 8) if aligned else 1
    C, K = (unit * draw(st.integers(1, max(40 // unit // groups, 1))) for _ in range(2))
    R, S = (draw(st.sampled_from([1, 2, 3, 3, 4, 5, 7])) for _ in range(2))
    stride = draw(strides), draw(strides)
    dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding, image = [], []
    for k, s, d in zip((R, S), stride, dilation, strict=True):
        lo, hi, out, spare = draw(
            st.tuples(
                *(st.integers(a, b) for a, b in ((0, 4), (0, 4), (1, 5), (0, s - 1)))
            )
        )
        padding.append((lo, hi))
        image.append(max((out - 1) * s + d * (k - 1) + 1 + spare - lo - hi, 1))
    N, dtype = draw(st.integers(1, 2)), draw(st.sampled_from(dtypes))
    return ConvSpec(
        N,
        C * groups,
        (image[0], image[1]),
        K * groups,
        (R, S),
        stride,
        (padding[0], padding[1]),
        dilation,
        groups,
        dtype,
    )


class Join(NamedTuple):
    """A call of `kernels.concat_channels`.

    Attributes:
        image: Extents (N, P, Q) of the result.
        sizes: Channels of each part.
        dtype: Data type.
        scaled: Whether channels are scaled and shifted.
        added: Whether a residual is added.
        activation: Name of the activation.
    """

    image: tuple[int, int, int]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    scaled: bool = False
    added: bool = False
    activation: str | None = None


@st.composite
def joins(draw: st.DrawFn) -> Join:
    """Draws as many narrow parts as the kernel takes, or a few of up to 144 channels."""
    unit = draw(st.sampled_from([1, 8]))
    most, count = draw(st.sampled_from([(24, MAX_PARTS), (144, 3)]))
    widths = st.lists(
        st.integers(0, most // unit).map(lambda n: n * unit),
        min_size=1,
        max_size=count,
    )
    return Join(
        draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))),
        tuple(draw(widths)),
        draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([None, *ACTIVATIONS])),
    )
