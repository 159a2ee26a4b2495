"""Forward of an image whose channels lie in several tensors, say those that several
devices computed: no concatenation.

y[n, k, p, q] = activation(scale[k] sum + shift[k] + residual[n, k, p, q]), each as
wanted, with sum = over segments i, r, s, c < C_i of w[k, FIRST_i + c, r, s] x_i[n, c, p
st + r dil - pad, q st + s dil - pad]

`correlate.by_pointers` with another reduction: its loop runs once for each segment,
each time from its own tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product

import triton
import triton.language as tl

from hetconv.errors import KernelError
from hetconv.kernels.epilogue import PLAIN, Finish
from hetconv.kernels.launch import Chip, Memory, Program
from hetconv.kernels.tiles import Extents, Path, Tile, cycles, depths, fits, shapes
from hetconv.sharding.conv_spec import Conv2dSpec

from . import fprop
from .activations import activated
from .fprop import Correlation, Taps


@triton.jit
def by_segments(
    x,
    w,
    y,
    scale,
    shift,
    residual,
    pixels,
    P,
    Q,
    H,
    W,
    M,
    xn,
    xh,
    xw,
    wo,
    wr,
    ws,
    yn,
    yp,
    yq,
    rn,
    rp,
    rq,
    FIRST: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    XU: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    HS: tl.constexpr,
    H0: tl.constexpr,
    HD: tl.constexpr,
    WS: tl.constexpr,
    W0: tl.constexpr,
    WD: tl.constexpr,
    WU: tl.constexpr,
    YU: tl.constexpr,
    RU: tl.constexpr,
    MU: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What has an entry per segment: its tensor in x and the strides of that in xn, xh
    and xw, which count in units XU; its first channel among those of the filters, its
    channels, and the blocks that these are read in.
    """
    M = M * MU
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)  # channels fastest: programs that share input run together
    block = (pid // tiles_m).to(tl.int64) if WIDE else pid // tiles_m
    pixel = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (pid % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = pixel % Q
    p = (pixel // Q) % P
    n = pixel // Q // P
    h = p * HS + H0
    v = q * WS + W0
    inside = pixel < pixels
    taken = tl.zeros(
        (BLOCK_N,), tl.int64 if R * S > 31 else tl.int32
    )  # a bit per tap that meets the image
    for a in tl.static_range(R):
        row = inside & (h + a * HD >= 0) & (h + a * HD < H)
        for b in tl.static_range(S):
            hit = row & (v + b * WD >= 0) & (v + b * WD < W)
            taken |= hit.to(taken.dtype) << (a * S + b)
    c = tl.arange(0, BLOCK_K)
    w_block = w + (m * wo)[None, :] * WU + c[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        x_block = (
            x[i] + (n * xn[i] + h * xh[i] + v * xw[i])[:, None] * XU[i] + c[None, :]
        )
        for it in range(R * S * BLOCKS[i]):
            tap = tl.cast(it // BLOCKS[i], tl.int64) if WIDE else it // BLOCKS[i]
            c0 = (it % BLOCKS[i]) * BLOCK_K
            r = tap // S
            s = tap % S
            x_ok = ((taken >> tap) & 1 != 0)[:, None]
            w_ok = (m < M)[None, :]
            if WIDTHS[i] % BLOCK_K:
                x_ok = x_ok & (c0 + c < WIDTHS[i])[None, :]
                w_ok = w_ok & (c0 + c < WIDTHS[i])[:, None]
            x_tile = tl.load(
                x_block + ((r * HD * xh[i] + s * WD * xw[i]) * XU[i] + c0),
                mask=x_ok,
                other=0.0,
            )
            w_tile = tl.load(
                w_block + ((r * wr + s * ws) * WU + (FIRST[i] + c0)),
                mask=w_ok,
                other=0.0,
            )
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(scale + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    if SHIFTED:
        acc += tl.load(shift + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    stored = inside[:, None] & (m < M)[None, :]
    if ADDED:
        r_block = residual + (n * rn + p * rp + q * rq)[:, None] * RU + m[None, :]
        acc += tl.load(r_block, mask=stored, other=0.0).to(tl.float32)
    acc = activated(acc, ACTIVATION, SLOPE)
    y_block = y + (n * yn + p * yp + q * yq)[:, None] * YU + m[None, :]
    tl.store(y_block, acc.to(y.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class Segmented(Extents):
    """A product whose channels are those of several segments, each of which takes whole steps."""

    widths: tuple[int, ...] = ()

    def steps_of(self, path: Path, k: int) -> int:
        return sum(-(-C // k) for C in self.widths) * self.taps


@dataclass(frozen=True)
class Segments:
    """What the kernel computes: a correlation, but of ``parts`` (N, C_i, H, W), none
    empty, that add up to its C.

    Of its x only the span counts, which is that of the part that spans most.
    """

    parts: tuple[Memory, ...]
    whole: Correlation

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(p.shape[1] for p in self.parts)

    @property
    def extents(self) -> Segmented:
        c, (N, _, P, Q), taps = (
            self.whole,
            self.whole.y.shape,
            self.whole.rows.count * self.whole.cols.count,
        )
        return Segmented(
            c.M,
            N * P * Q,
            c.C,
            taps,
            1,
            c.x.dtype,
            (N, P, Q),
            ieee=c.ieee,
            widths=self.widths,
        )


def forward(
    spec: Conv2dSpec,
    parts: tuple[Memory, ...],
    w: Memory,
    y: Memory,
    precision: str,
    residual: Memory | None = None,
) -> Segments:
    rows, cols = (
        Taps(k, stride=s, offset=-pad[0], reach=d)
        for k, s, pad, d in zip(
            (spec.R, spec.S), spec.stride, spec.padding, spec.dilation, strict=True
        )
    )
    x = max(parts, key=lambda p: p.spans)
    whole = Correlation(
        spec.K, spec.C, 1, rows, cols, x, w, y, precision, residual=residual
    )
    return Segments(tuple(p for p in parts if p.shape[1]), whole)


# What `by_pointers` takes besides: it also reads groups and parts of filters,
# transposed ones, and sums in splits.
BESIDES = {"C", "R0", "RD", "S0", "SD", "TRANSPOSED", "NUMBERS", "SPLITS", "wg", "yz"}


def program(s: Segments, tile: Tile, finish: Finish = PLAIN) -> Program:
    """One launch on tensors x0, x1, ..., one for each of the parts, w and y."""
    if tile.path != "pointers" or tile.splits > 1:
        raise KernelError(
            f"tile {tile} cannot read segments; give a tile of pointers without splits, or none"
        )
    (like,) = fprop.program(s.whole, tile, finish).recipes
    units = tuple(p.unit for p in s.parts)
    strides = [[v // u for v in p.strides] for p, u in zip(s.parts, units, strict=True)]
    scalars = {
        name: tuple(v[d] for v in strides)
        for name, d in (("xn", 0), ("xh", 2), ("xw", 3))
    }
    constants = {
        "FIRST": tuple(accumulate(s.widths[:-1], initial=0)),
        "WIDTHS": s.widths,
        "XU": units,
    }
    constants["BLOCKS"] = tuple(-(-C // tile.k) for C in s.widths)
    return Program(
        (
            replace(
                like,
                kernel=by_segments,
                tensors={
                    **like.tensors,
                    "x": tuple(f"x{i}" for i in range(len(s.parts))),
                },
                scalars={k: v for k, v in like.scalars.items() if k not in BESIDES}
                | scalars,
                constants={k: v for k, v in like.constants.items() if k not in BESIDES}
                | constants,
            ),
        )
    )


IEEE_SHAPES = (
    (128, 128),
    (64, 32),
    (32, 64),
)  # 16 deep; without tensor cores others spill registers


@lru_cache(4096)
def default(work: Segmented, chip: Chip) -> Tile:
    """The tile without splits of the fewest `cycles`, with as many stages as fit."""
    sides = [
        v for v in shapes(work, "pointers") if not work.ieee or v[:2] in IEEE_SHAPES
    ]
    deep = product(sides, [16] if work.ieee else depths(work, "pointers"))
    found = [
        Tile("pointers", m, n, k, w, z)
        for (m, n, w, s), k in deep
        for z in range(s, 1, -1)
    ]
    return min(
        (t for t in found if fits(t, work, chip)), key=lambda t: cycles(t, work, chip)
    )
