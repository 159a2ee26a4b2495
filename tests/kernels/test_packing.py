"""Who moves the boxes of `kernels.pack` and `unpack`, in how many launches; what they
refuse; who calls them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hetconv import kernels
from hetconv.comm.rank_group import count_sent, through_backend
from hetconv.comm.redistribute import redistribute
from hetconv.errors import KernelError
from hetconv.kernels.launch import Launch
from hetconv.sharding.layout import Box, Layout, ReadRegion
from hetconv.sharding.moves import Move, bytes_per_pair, overlaps
from tests import ROOT
from tests.compiled import check_wide_moves
from tests.interpreter import DEVICE, ON_GPU
from tests.spawn import spawn

from .triton.test_pack import image, same_bits


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many boxes each launch moved."""
    found: list[int] = []
    run = Launch.run

    def recorded(self: Launch, tensors: Any) -> None:
        found.append(len(self.constants["UNITS"]))
        run(self, tensors)

    monkeypatch.setattr(Launch, "run", recorded)
    return found


@pytest.mark.parametrize("count", [1, 4, 16, 17])
def test_it_is_one_launch_for_up_to_16_boxes(count: int, launched: list[int]) -> None:
    kernels.set_backend("triton")
    x, y = (image((2, 3, count + 1, 4), torch.float32, s) for s in (0, 1))
    expected = [16, 1] if count == 17 else [count]
    wires = kernels.pack(x.split(1, 2)[:-1])
    assert launched == expected
    kernels.unpack([w.movedim(-1, 1) for w in wires], y.split(1, 2)[:-1])
    assert launched == expected * 2
    assert same_bits(x[:, :, :-1], y[:, :, :-1])


def test_pieces_that_need_no_copy_are_not_launched(launched: list[int]) -> None:
    kernels.set_backend("triton")
    x = image((2, 8, 6, 4), torch.float16)
    pieces = [x, x[1:, :, 2:4], x[:, :, :0], x[:, :, 1:3], x[:, :, 2:2]]
    wires = kernels.pack(pieces)
    assert launched == [1]
    assert all(
        same_bits(w, p.movedim(1, -1)) for w, p in zip(wires, pieces, strict=True)
    )
    assert kernels.pack([]) == []
    kernels.unpack([], [])
    kernels.unpack([x[:, :, :0]], [x[:, :, 3:3]], add=True)
    assert launched == [1]


def test_auto_is_triton_on_a_gpu_alone(launched: list[int]) -> None:
    x = image((2, 8, 6, 4), torch.float16)
    for backend, expected in (
        ("auto", [1] * ON_GPU),
        ("aten", [1] * ON_GPU),
        ("triton", [1] * ON_GPU + [1]),
    ):
        kernels.set_backend(backend)  # type: ignore[arg-type]
        kernels.pack([x[:, :, 1:]])
        assert launched == expected


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.uint8, torch.complex128]
)
def test_other_dtypes_are_atens(dtype: torch.dtype, launched: list[int]) -> None:
    kernels.set_backend("triton")
    x = (
        torch.arange(2 * 3 * 4 * 5, device=DEVICE)
        .to(dtype)
        .view(2, 4, 5, 3)
        .permute(0, 3, 1, 2)
    )
    y = torch.zeros_like(x)
    wires = kernels.pack(x.split(2, 2))
    assert all(
        w.is_contiguous() and w.equal(p.movedim(1, -1))
        for w, p in zip(wires, x.split(2, 2), strict=True)
    )
    for factor, add in ((1, False), (2, True)):
        kernels.unpack([w.movedim(-1, 1) for w in wires], y.split(2, 2), add=add)
        assert y.equal(factor * x)
    assert launched == []


def test_what_does_not_lie_in_channels_is_atens(launched: list[int]) -> None:
    """Pieces, parts and places of an image in NCHW, beside others that the kernel moves."""
    kernels.set_backend("triton")
    x = image((2, 3, 6, 4), torch.float32)
    rows = x.contiguous().split(2, 2)
    pieces = [rows[0], x[:, :, 2:4], rows[2]]
    wires = kernels.pack(pieces)
    assert all(
        w.is_contiguous() and same_bits(w, p.movedim(1, -1))
        for w, p in zip(wires, pieces, strict=True)
    )
    y, z = x.contiguous().zero_(), torch.zeros_like(x)
    kernels.unpack([*pieces, pieces[0]], [*y.split(2, 2), z[:, :, :2]])
    assert launched == [1]
    assert same_bits(y, image((2, 3, 6, 4), torch.float32).contiguous())
    kernels.unpack([w.movedim(-1, 1) for w in wires], z.split(2, 2))
    assert launched == [1, 3]
    assert same_bits(z, y)


@pytest.mark.parametrize("add", [False, True])
def test_parts_that_are_no_images_are_atens(add: bool, launched: list[int]) -> None:
    kernels.set_backend("triton")
    x = (
        torch.arange(2.0 * 3 * 4 * 5 * 6, device=DEVICE)
        .view(2, 4, 5, 6, 3)
        .movedim(-1, 1)
    )
    for whole in (x, x[..., 0, 0]):
        y = torch.ones_like(whole)
        kernels.unpack(whole.split(2, 2), y.split(2, 2), add=add)
        assert y.equal(whole + add)
    assert launched == []


def test_there_is_no_autograd() -> None:
    for backend in ("triton", "aten"):
        kernels.set_backend(backend)  # type: ignore[arg-type]
        x = torch.ones(2, 6, 5, 3, device=DEVICE).permute(0, 3, 1, 2).requires_grad_()
        pieces = [x, x[:, :, 1:3]]
        wires = kernels.pack(pieces)
        assert not any(w.requires_grad for w in wires)
        kernels.unpack([pieces[1]], [x[:, :, 3:5]], add=True)
        assert x[:, :, 3:5].eq(2).all()
        assert x.is_leaf


def ones(
    shape: tuple[int, ...] = (2, 3, 4, 5),
    dtype: torch.dtype = torch.float32,
    device: Any = DEVICE,
) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a piece of three dimensions": (
        lambda: kernels.pack([ones(), ones()[0]]),
        (
            r"piece 1 is \(3, 4, 5\) .* but a piece is "
            r"\(N, c, h, w\); give"
        ),
    ),
    "a piece's dtype": (
        lambda: kernels.pack([ones(), ones(dtype=torch.float16)]),
        (
            r"piece 1 is .*float16 on .*, but piece 0 is .*float32 on .*; give all in one dtype "
            r"and on one device"
        ),
    ),
    "a piece's device": (
        lambda: kernels.pack([ones(), ones(device="meta")]),
        ("piece 1 is .* on meta, but piece 0 is .*; give all in"),
    ),
    "fewer places": (
        lambda: kernels.unpack([ones(), ones()], [ones()]),
        ("2 parts were given with 1 places; give one place for each"),
    ),
    "a place's shape": (
        lambda: kernels.unpack([ones(), ones()], [ones(), ones((2, 3, 4, 1))]),
        r"part 1 is \(2, 3, 4, 5\) .* its place \(2, 3, 4, 1\) .* must be of one shape",
    ),
    "a part's dtype": (
        lambda: kernels.unpack([ones(dtype=torch.float16)], [ones()]),
        ("part 0 is .*float16 .* place 0 is .*float32"),
    ),
    "a part's device": (
        lambda: kernels.unpack([ones(device="meta")], [ones()]),
        "part 0 is .* on meta, but place 0",
    ),
    "a place's dtype": (
        lambda: kernels.unpack([ones(), ones()], [ones(), ones(dtype=torch.float16)]),
        "place 1 is .*float16.* place 0",
    ),
    "an expanded place": (
        lambda: kernels.unpack([ones()], [ones((1, 3, 4, 5)).expand(2, -1, -1, -1)]),
        (
            r"place 0 of shape \(2, 3, 4, 5\) has strides \(0, 20, 5, 1\).* give a view that is "
            r"not expanded"
        ),
    ),
}


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, backend: Any) -> None:
    kernels.set_backend(backend)
    call, match = REFUSED[name]
    with pytest.raises(KernelError, match=match):
        call()


COMPILED = """
import json
from dataclasses import asdict
from hetconv.kernels.launch import StridedLayout
from hetconv.kernels.triton.compile_report import report
from hetconv.kernels.triton.pack import move_launch
whole = (56 * 56 * 256, 1, 56 * 256, 256)
packed = lambda c, h, w: StridedLayout((32, c, h, w), (c * h * w, 1, c * w, c), dtype)
def pair(c, h, w, back):
    pair = StridedLayout((32, c, h, w), whole, dtype), packed(c, h, w)
    return pair[::-1] if back else pair
found = {}
for dtype, arch in (("bfloat16", 90), ("float32", 80)):
    shapes = {"rows": (256, 2, 56), "columns": (256, 56, 3), "channels": (64, 28, 28)}
    for name, shape in shapes.items():
        for back, add in ((False, False), (True, True)):
            launch = move_launch((pair(*shape, back),) * 2, add)
            key = f"{name} {dtype} sm_{arch} back={back} add={add}"
            found[key] = asdict(report(launch, dtype, arch))
print(json.dumps(found))
"""


def test_compiled_for_gpus_it_moves_16_bytes_at_a_time_and_spills_nothing(
    tmp_path: Path,
) -> None:
    check_wide_moves(COMPILED, tmp_path, 12)


def test_triton_is_not_loaded_before_it_is_used() -> None:
    code = (
        "import sys, torch; from hetconv import kernels; x = torch.ones(2, 3, 4, 5); "
        "kernels.pack([x]); "
    )
    code += (
        "kernels.unpack([x], [x.clone()], add=True); assert 'triton' not in sys.modules"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, check=True, timeout=60
    )


Place = Layout | ReadRegion


def halos(
    shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], reach: int = 1
) -> ReadRegion:
    """Each slice along ``dim`` with ``reach`` rows (columns) more on either side."""
    whole, ends = Box.whole(shape), [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return ReadRegion(
        shape,
        tuple(
            whole.with_range(dim, max(a - reach, 0), min(b + reach, shape[dim]))
            for a, b in pairwise(ends)
        ),
    )


class Moved(NamedTuple):
    """This rank's part; the bytes it sent for it; of each launch, the boxes moved; its
    gradients by Triton and ATen.
    """

    y: Tensor
    sent: Counter[int]
    launched: list[int]
    gradients: list[Tensor]


def rank_moving(cases: list[tuple[Layout, Place, Tensor, Tensor]]) -> list[Moved]:
    launched: list[int] = []
    run = Launch.run

    def recorded(self: Launch, tensors: Any) -> None:
        launched.append(len(self.constants["UNITS"]))
        run(self, tensors)

    Launch.run = recorded  # type: ignore[method-assign]
    rank, found = dist.get_rank(), []
    for src, dst, x, g in cases:
        whole = Box.whole(src.shape)
        local = (
            x[src.boxes[rank].slices_in(whole)]
            .clone(memory_format=torch.channels_last)
            .requires_grad_()
        )
        gradients = []
        for backend in ("aten", "triton"):
            kernels.set_backend(backend)  # type: ignore[arg-type]
            launched.clear()
            with count_sent() as sent, through_backend():
                y = redistribute(local, src, dst)
            forward = list(launched)
            with through_backend():
                gradients += torch.autograd.grad(
                    y, local, g[dst.boxes[rank].slices_in(whole)]
                )
        found.append(Moved(y.detach(), sent, forward, gradients))
    return found


def expected_launches(src: Layout, dst: Place, x: Tensor, rank: int) -> list[int]:
    """One of all pieces that do not lie as they travel; one of all that arrives, with
    what this rank has itself.
    """
    moving, mine = overlaps(src.boxes, dst.boxes), src.boxes[rank]
    local = x[mine.slices_in(Box.whole(src.shape))].clone(
        memory_format=torch.channels_last
    )
    outgoing = [local[box.slices_in(mine)] for s, r, box in moving if s == rank != r]
    strewn = sum(not t.movedim(1, -1).is_contiguous() for t in outgoing)
    return [n for n in (strewn, sum(r == rank for _, r, _ in moving)) if n]


@pytest.mark.skipif(
    ON_GPU,
    reason="tensors of a GPU are not handed to ranks; those on a GPU are test_device's",
)
@pytest.mark.parametrize("sizes", [(3, 4), (2, 4, 1)], ids=str)
def test_ranks_exchange_slabs_in_one_launch(sizes: tuple[int, ...]) -> None:
    """Halos, a gather, and a cut along rows turned to one along columns, or back, of two images."""
    shape, cases = (2, 8, 7, 7), []
    for dim, dtype in product((2, 3), (torch.bfloat16, torch.float32)):
        src = Layout.sharded(shape, dim, sizes)
        places: list[Place] = [
            halos(shape, dim, sizes),
            Layout.replicated(shape, len(sizes)),
            Layout.sharded(shape, 5 - dim, sizes[::-1]),
        ]
        x, g = (image(shape, dtype, seed, finite=True) for seed in (0, 1))
        cases += [(src, dst, x, g) for dst in places]
    found = spawn(len(sizes), rank_moving, cases)
    for i, (src, dst, x, _) in enumerate(cases):
        sends = bytes_per_pair(Move(src, dst).forward, x.element_size())
        assert {
            (r, peer): n for r, of in enumerate(found) for peer, n in of[i].sent.items()
        } == sends
        for rank, of in enumerate(found):
            assert same_bits(of[i].y, x[dst.boxes[rank].slices_in(Box.whole(shape))])
            assert of[i].launched == expected_launches(src, dst, x, rank)
            assert same_bits(*of[i].gradients)
