"""Images and numbers for the tests of Triton's passes of norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from hetconv.kernels import CHANNELS_LAST
from hetconv.kernels.epilogue import Epilogue, activate
from tests.interpreter import DEVICE

EPS = 0.1
SLOPE = 0.2
EXACT = 1e-5  # of results in float32, whatever the data type of the image
MEMORIES = ("contiguous", "channels last", "rows", "rows of channels last", "columns")


class Case(NamedTuple):
    """An image: its shape (N, C, ...), its groups of channels, and how it lies."""

    shape: tuple[int, ...]
    groups: int
    memory: str
    dtype: str

    def image(self, seed: int, centre: float = 0.0) -> Tensor:
        return image(self.shape, self.memory, self.dtype, seed, centre)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group = draw(st.sampled_from([1, 2, 5]))
    groups = draw(st.sampled_from([1, 3, 4]))
    side = st.integers(1, 7)
    spatial = draw(st.lists(side, min_size=0, max_size=3))
    shape = (draw(st.integers(1, 3)), group * groups, *spatial)
    memories = MEMORIES if len(spatial) else MEMORIES[:1]
    if len(shape) not in CHANNELS_LAST:
        memories = tuple(m for m in memories if "channels" not in m)
    memory = draw(st.sampled_from(memories))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    return Case(shape, groups, memory, dtype)


def image(
    shape: tuple[int, ...], memory: str, dtype: str, seed: int, centre: float = 0.0
) -> Tensor:
    """Random numbers, as a slice of a larger image where ``memory`` is of rows or columns."""
    random = torch.Generator().manual_seed(seed)
    whole = list(shape)
    cut = 2 if memory.startswith("rows") else len(shape) - 1
    if memory.startswith(("rows", "columns")):
        whole[cut] += 3
    t = (torch.randn(whole, generator=random) + centre).to(getattr(torch, dtype))
    if "channels last" in memory:
        t = t.contiguous(memory_format=CHANNELS_LAST[t.dim()])
    return t.to(DEVICE).narrow(cut, 1 if whole[cut] > shape[cut] else 0, shape[cut])


def numbers(shape: tuple[int, ...], count: int) -> list[Tensor]:
    """Random float32 numbers near 1."""
    random = torch.Generator().manual_seed(7)
    return [
        (torch.rand(shape, generator=random) + 0.5).to(DEVICE) for _ in range(count)
    ]


def on_image(t: Tensor, x: Tensor) -> Tensor:
    """Numbers (C,) or (N, C) in float64 on the CPU, broadcast over the shape of x."""
    t = t.double().cpu()
    t = t if t.dim() == 2 else t[None]
    return t.view(*t.shape, *(1,) * (x.dim() - 2))


def finished(z: Tensor, epilogue: Epilogue) -> Tensor:
    """The definition of an epilogue, in float64 on the CPU."""
    if epilogue.scale is not None:
        z = z * on_image(epilogue.scale, z)
    if epilogue.shift is not None:
        z = z + on_image(epilogue.shift, z)
    if epilogue.residual is not None:
        z = z + epilogue.residual
    return activate(z, epilogue.activation, epilogue.slope)


def epilogue_of(case: Case, name: str, with_residual: bool) -> Epilogue:
    scale, shift = numbers(case.shape[1:2], 2)
    residual = case.image(5) if with_residual else None
    return Epilogue(scale, shift, residual, name, SLOPE)


def in_float64(epilogue: Epilogue) -> Epilogue:
    if epilogue.residual is None:
        return epilogue
    return epilogue._replace(residual=epilogue.residual.double().cpu())
