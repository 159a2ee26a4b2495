"""A function of tensors on parts against the same function on whole tensors, for every
placement.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetconv
from hetconv.comm.rank_group import rank_group_of
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.hierarchical import HierarchicalLayout
from hetconv.sharding.layout import Box, Layout, spans
from tests.equivalence import Differences, apart, leaves

SHAPE = (4, 8, 6, 5)
WORLD = 3
Fn = Callable[
    ..., Any
]  # of (x, z, p): a tensor, a second one placed otherwise, and plain tensors of many shapes


def in_nodes(
    nodes: tuple[int, ...], samples: tuple[int, ...], dim: int, sizes: tuple[int, ...]
) -> HierarchicalLayout:
    """Each node's ranks cut its samples along ``dim`` in the sizes of its own."""
    parts = [Layout.sharded(SHAPE, dim, sizes[a:b]) for a, b in spans(nodes)]
    return HierarchicalLayout.from_nodes(nodes, samples, parts)


PLACEMENTS: dict[str, Layout] = {
    "replicated": Layout.replicated(SHAPE, WORLD),
    "partial": Layout.partial(SHAPE, WORLD, (5, 2, 1)),
    "partial, one rank without channels": Layout.partial(SHAPE, WORLD, (4, 0, 4)),
    "partial, wanted whole": Layout.partial(SHAPE, WORLD, ()),
    "samples": Layout.sharded(SHAPE, 0, (1, 2, 1)),
    "samples on two ranks": Layout.sharded(SHAPE, 0, (3, 0, 1)),
    "channels": Layout.sharded(SHAPE, 1, (5, 2, 1)),
    "channels on two ranks": Layout.sharded(SHAPE, 1, (4, 4, 0)),
    "rows": Layout.sharded(SHAPE, 2, (1, 2, 3)),
    "rows on one rank": Layout.sharded(SHAPE, 2, (0, 6, 0)),
    "columns": Layout.sharded(SHAPE, 3, (2, 1, 2)),
    "columns on two ranks": Layout.sharded(SHAPE, 3, (0, 1, 4)),
    "rows in another order": Layout(
        SHAPE, "sharded", Layout.sharded(SHAPE, 2, (1, 2, 3)).boxes[::-1]
    ),
    "rows in nodes": in_nodes((2, 1), (3, 1), 2, (4, 2, 6)),
    "columns in nodes, one rank without": in_nodes((1, 2), (1, 3), 3, (5, 0, 5)),
    "partial in nodes": HierarchicalLayout.from_nodes(
        (2, 1), (1, 3), (Layout.partial(SHAPE, 2, (3, 1)), Layout.partial(SHAPE, 1))
    ),
}
PARAMS = {
    "full": SHAPE,
    "nc11": (4, 8, 1, 1),
    "1c11": (1, 8, 1, 1),
    "c11": (8, 1, 1),
    "n111": (4, 1, 1, 1),
    "hw": (6, 5),
    "w": (5,),
    "one": (),
    "h1": (6, 1),
    "1111": (1, 1, 1, 1),
    "c": (8,),
    "more": (2, 4, 8, 6, 5),
}


def summands(whole: Tensor, layout: Layout) -> list[Tensor]:
    """Parts whose sum in rank order is ``whole``, for a partial layout; else slices of it."""
    if layout.kind != "partial":
        return [
            whole[box.slices_in(Box.whole(layout.shape))].clone()
            for box in layout.boxes
        ]
    parts: list[Tensor] = []
    for rank, box in enumerate(layout.boxes):
        own, mates = whole[box.slices_in(Box.whole(layout.shape))], layout.peers(rank)
        last = rank == mates.stop - 1
        rounded = (own * (rank - mates.start + 1) / 4).round(decimals=3)
        parts.append(own - sum(parts[mates.start :]) if last else rounded)
    return parts


def value(parts: list[Tensor], layout: Layout) -> Tensor:
    """What the parts add up to, added in rank order."""
    whole = torch.zeros(layout.shape, dtype=parts[0].dtype)
    for box, part in zip(layout.boxes, parts, strict=True):
        whole[box.slices_in(Box.whole(layout.shape))] += part
    return whole


def placed(whole: Tensor, layout: Layout) -> tuple[HetTensor, Tensor]:
    """(the tensor on parts, its local leaf)."""
    local = summands(whole, layout)[dist.get_rank()].requires_grad_(
        whole.is_floating_point()
    )
    return HetTensor.wrap(local, layout, rank_group_of()), local


def full_gradient(local: Tensor, layout: Layout) -> Tensor | None:
    if local.grad is None:
        return None
    whole, held, grad = (
        Layout.replicated(layout.shape, layout.world),
        layout,
        local.grad,
    )
    if (
        isinstance(layout, HierarchicalLayout) and layout.kind == "partial"
    ):  # that of each node's first rank
        first = [rank == layout.peers(rank).start for rank in range(layout.world)]
        boxes = (
            box if own else box.with_range(0, 0, 0)
            for box, own in zip(layout.boxes, first, strict=True)
        )
        held, grad = (
            Layout(layout.shape, "sharded", tuple(boxes)),
            grad if first[dist.get_rank()] else grad[:0],
        )
    elif layout.kind == "partial":
        held = whole
    return hetconv.redistribute(grad, held, whole)


def on_parts(
    fn: Fn,
    name: str,
    dtype: torch.dtype = torch.float64,
    module: nn.Module | None = None,
    other: str = "rows",
) -> Differences:
    """Differences of output, all gradients and a module's state, at positive values:
    functions are smooth there.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)

    def positive(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).to(
            dtype
        )

    x_true, z_true = positive(*SHAPE), positive(*SHAPE)
    p_true = {k: positive(*shape).requires_grad_() for k, shape in PARAMS.items()}
    p_parts = {k: v.detach().clone().requires_grad_() for k, v in p_true.items()}
    layout, z_layout = PLACEMENTS[name], PLACEMENTS[other]
    (x, x_local), (z, z_local) = placed(x_true, layout), placed(z_true, z_layout)
    x_true = (
        value(summands(x_true, layout), layout) if layout.kind == "partial" else x_true
    )
    x_true, z_true = x_true.detach().requires_grad_(), z_true.detach().requires_grad_()
    extra, extra_parts = (
        (module, copy.deepcopy(module)) if module is not None else (None, None)
    )
    expected = leaves(fn(x_true, z_true, p_true) if extra is None else extra(x_true))
    found = leaves(fn(x, z, p_parts) if extra_parts is None else extra_parts(x))
    found = [hetconv.gather(y) for y in found]
    pairs = list(zip(found, expected, strict=True))
    result = {f"output {i}": apart(a, b) for i, (a, b) in enumerate(pairs)}
    result |= {
        f"dtype {i}": float(a.dtype != b.dtype) for i, (a, b) in enumerate(pairs)
    }
    result |= {
        f"graph {i}": float(a.requires_grad != b.requires_grad)
        for i, (a, b) in enumerate(pairs)
    }
    for a, b in pairs:
        if b.requires_grad:
            g = torch.randn(b.shape, generator=generator, dtype=torch.float64).to(
                b.dtype
            )
            a.backward(g, retain_graph=True)
            b.backward(g, retain_graph=True)
    result |= {
        "x": apart(
            whole_or_zero(full_gradient(x_local, layout), x_true),
            whole_or_zero(x_true.grad, x_true),
        ),
        "z": apart(
            whole_or_zero(full_gradient(z_local, z_layout), z_true),
            whole_or_zero(z_true.grad, z_true),
        ),
    }
    result |= {k: apart(p_parts[k].grad, p_true[k].grad) for k in PARAMS}
    if extra is not None and extra_parts is not None:
        named = zip(extra.named_parameters(), extra_parts.parameters(), strict=True)
        result |= {f"gradient {k}": apart(b.grad, a.grad) for (k, a), b in named}
        state = extra_parts.state_dict()
        result |= {
            f"state {k}": apart(state[k], v) for k, v in extra.state_dict().items()
        }
    return result


def sequence(fn: Fn) -> Fn:
    return lambda x, z, p: fn(x.flatten(2), z, p)


def volume(fn: Fn) -> Fn:
    """The function of a tensor with a dimension more, placed likewise."""

    def deep(x: Tensor) -> Tensor:
        return x[..., None] * torch.arange(1, 5, dtype=x.dtype)

    def of(x: Tensor, z: Tensor, p: Any) -> Any:
        if not isinstance(x, HetTensor):
            return fn(deep(x), z, p)
        own = x.placement
        boxes = tuple(Box((*b.lo, 0), (*b.hi, 4)) for b in own.boxes)
        layout = dataclasses.replace(own, shape=(*own.shape, 4), boxes=boxes)
        return fn(HetTensor.wrap(deep(x.local), layout, x.group), z, p)

    return of


def whole_or_zero(g: Tensor | None, like: Tensor) -> Tensor:
    """No gradient and a gradient of zero are the same to a caller."""
    return torch.zeros_like(like) if g is None else g


def gathered(
    functions: Mapping[str, Fn], places: Sequence[str]
) -> set[tuple[str, str]]:
    """The functions, and where they were cut, of which a result is whole on every rank."""
    found = set()
    for name, fn in functions.items():
        for place in places:
            x, _ = placed(
                torch.rand(SHAPE, dtype=torch.float64) + 0.5, PLACEMENTS[place]
            )
            results = leaves(fn(x, x, {}))
            if any(
                not isinstance(y, HetTensor) or y.placement.kind == "replicated"
                for y in results
            ):
                found.add((name, place))
    return found


def in_every_placement(
    fn: Fn, dtype: torch.dtype = torch.float64, autocast: bool = False
) -> dict[str, Differences]:
    """Differences by placement, under autocast to bfloat16 if asked."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return {place: on_parts(fn, place, dtype) for place in PLACEMENTS}


def check(found: list[dict[str, Differences]], tolerance: float = 1e-12) -> None:
    """Of all ranks and places, by place, nothing differs by more."""
    wrong = {
        (place, what): value
        for differences in found
        for place, values in differences.items()
        for what, value in values.items()
        if not value <= tolerance
    }
    assert not wrong


def layouts_of(x: Tensor, world: int) -> list[Layout]:
    """How a tensor of this shape can lie in parts."""
    shape, found = tuple(x.shape), list[Layout]()
    for d, n in enumerate(shape):
        rest = n - n // 3 * (world - 1)
        found.append(Layout.sharded(shape, d, (rest, *(n // 3,) * (world - 1))))
    if shape:
        d = len(shape) - 1
        cut, n = found[d // 2], shape[d]
        found.append(Layout(shape, "sharded", cut.boxes[::-1]))
        found.append(Layout.sharded(shape, d, (0, n, *(0,) * (world - 2))))
        found.append(
            Layout.sharded(
                shape, 0, (shape[0] // 2, *(0,) * (world - 2), shape[0] - shape[0] // 2)
            )
        )
    if x.is_floating_point():
        found.append(Layout.partial(shape, world, ()))
    if x.is_floating_point() and len(shape) > 1 and shape[1] >= 2:
        found.append(
            Layout.partial(shape, world, (1, shape[1] - 1, *(0,) * (world - 2)))
        )
    found.append(Layout.replicated(shape, world))
    return found
