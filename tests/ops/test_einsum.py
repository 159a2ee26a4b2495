"""Matrix products and einsum on shards: equal to the whole, and what they read of the inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hetconv.operators.einsum import Contraction
from hetconv.sharding.layout import Box, Layout, ReadRegion
from tests.equivalence import Differences, assert_same, train
from tests.nets import splits_of
from tests.placed import SHAPE, WORLD, Fn, check, gathered, in_every_placement
from tests.spawn import on_ranks
from tests.strategies import layouts, worlds

FUNCTIONS: dict[str, Fn] = {
    "a 1 x 1 convolution": lambda x, z, p: torch.einsum(
        "nchw,oc->nohw", x, p["h1"].expand(6, 8)
    ),
    "by pixels": lambda x, z, p: x.permute(0, 2, 3, 1) @ p["c"][:, None],
    "two of images": lambda x, z, p: torch.einsum("nchw, ncvw -> nhv", x, z),
    "everything": lambda x, z, p: torch.einsum("nchw,nchw->", x, z),
    "broadcast": lambda x, z, p: torch.einsum("nchw,nchw->nhw", x, p["nc11"]),
    "three": lambda x, z, p: torch.einsum("nchw,c,hw->nc", x, p["c"], p["hw"]),
    "outer": lambda x, z, p: torch.einsum("nchw,k->nkchw", x, p["w"]),
    "transposed": lambda x, z, p: torch.einsum("nchw->wnhc", x),
    "diagonal": lambda x, z, p: torch.einsum("nchh->nc", x[..., :5, :]),
    "implicit": lambda x, z, p: torch.einsum("nchw,c", x, p["c"]),
    "ellipsis": lambda x, z, p: torch.einsum("...w,w->...", x, p["w"]),
    "matmul": lambda x, z, p: x @ z.mT,
    "matmul with itself": lambda x, z, p: torch.matmul(x[..., :5, :], x[..., :5, :]),
    "matmul of more": lambda x, z, p: p["more"].mT @ x,
    "matmul of fewer": lambda x, z, p: torch.matmul(input=x, other=p["w"][:, None]),
    "matmul of a vector": lambda x, z, p: x @ p["w"],
    "bmm": lambda x, z, p: torch.bmm(x.flatten(0, 1), z.flatten(0, 1).mT),
    "mm": lambda x, z, p: torch.mm(x.flatten(1), z.flatten(1).t()),
    "attention": lambda x, z, p: (x @ z.mT).softmax(-1) @ z,
}
GATHERED_OVER_ROWS = {
    "diagonal",
    "implicit",
    "ellipsis",
    "matmul of a vector",
    "mm",
}  # the last as it flattens


def everywhere(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Differences]:
    return in_every_placement(FUNCTIONS[name], dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    check(on_ranks(WORLD, everywhere, name), 1e-11)


class Mixing(nn.Module):
    """A product of pixels with a parameter between two convolutions, then one of
    channels with channels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = (
            nn.Conv2d(3, 6, 3),
            nn.Conv2d(4, 4, 3),
            nn.Parameter(torch.randn(4, 6)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.einsum("nchw,oc->nohw", self.a(x), self.w)).flatten(2)
        return (y @ y.mT).softmax(-1)


def trained(kind: str) -> Differences:
    return train(Mixing, splits_of(Mixing(), (kind,), (2, 0, 1)), (2, 3, 9, 8), WORLD)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sample", "height", "filter", "channel"])
def test_a_net_trains_as_on_one_device(kind: str) -> None:
    assert_same(on_ranks(WORLD, trained, kind))


MATMUL = Contraction((3, 4, 5), (("b", "m", "k"), ("b", "k", "n")), ("b", "m", "n"))
SHAPES = (3, 4, 6), (3, 6, 5)


@given(st.data(), worlds)
def test_a_product_of_parts_is_a_part_of_the_product(
    data: st.DataObject, world: int
) -> None:
    inputs = tuple(data.draw(layouts(shape, world)) for shape in SHAPES)
    a, b = (torch.arange(float(Box.whole(shape).numel)).view(shape) for shape in SHAPES)
    sharding, total = MATMUL.sharding(inputs), torch.zeros(MATMUL.shape)
    for rank, box in enumerate(sharding.output.boxes):
        own = (
            read.boxes[rank].slices_in(Box.whole(read.shape))
            for read in sharding.input_layouts
        )
        part = a[next(own)] @ b[next(own)]
        assert part.shape == box.shape
        total[box.slices_in(Box.whole(MATMUL.shape))] += part
    assert torch.equal(
        total, a @ b * (world if sharding.output.kind == "replicated" else 1)
    )


@pytest.mark.parametrize(
    ("dim", "kind", "cut"), [(0, "sharded", 0), (1, "sharded", 1), (2, "partial", None)]
)
def test_the_first_input_that_is_cut_says_how(
    dim: int, kind: str, cut: int | None
) -> None:
    x = Layout.sharded(SHAPES[0], dim, (SHAPES[0][dim] - 1, 1))
    sharding = MATMUL.sharding((x, Layout.replicated(SHAPES[1], 2)))
    assert (sharding.output.kind, sharding.output.dim, sharding.partial_grads) == (
        kind,
        cut,
        True,
    )
    assert sharding.input_layouts[0] == x
    assert isinstance(sharding.input_layouts[1], ReadRegion) is (dim == 1)


def found() -> set[tuple[str, str]]:
    wide = {
        k: torch.ones(shape)
        for k, shape in {"h1": (6, 1), "c": (8,), "w": (5,), "hw": (6, 5)}.items()
    }
    wide |= {"nc11": torch.ones(4, 8, 1, 1), "more": torch.ones(2, *SHAPE)}
    double = {k: v.double() for k, v in wide.items()}
    return gathered(
        {k: lambda x, z, p, fn=fn: fn(x, z, double) for k, fn in FUNCTIONS.items()},
        ["rows"],
    )


def test_everything_else_runs_on_parts() -> None:
    expected = {(name, "rows") for name in GATHERED_OVER_ROWS}
    assert all(names == expected for names in on_ranks(WORLD, found))
