"""Input gradient: dx[n, c, h, v] = sum over k, r, s of w[k, c, r, s] g[n, k, p, q] p st + r dil - pad = h, and so v.

Rows h = a mod stride are read by the same filter rows, so each phase (a, b) of the stride is a correlation at stride 1
that writes dx[:, :, a::stride, b::stride]. Over a slice of the filters dx is a summand of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

from hetconv.kernels.memory import Memory
from hetconv.sharding.conv_spec import ITEMSIZE, Conv2dSpec, Window

from .fprop import Correlation, Slot, Taps, simplified


@dataclass(frozen=True)
class Phase:
    """Every stride-th row and column of dx, as a correlation of g; None where no filter tap reads them."""

    slot: Slot
    correlation: Correlation | None


def phases(spec: Conv2dSpec, g: Memory, w: Memory, dx: Memory, precision: str) -> list[Phase]:
    """The parts of dx, which cover it, from g (N, K, P, Q), w (K, C / groups, R, S) and dx (N, C, H, W) as they lie."""
    (N, C, H, W), (n, c, h, v) = dx.shape, dx.strides
    (sh, sw), groups, found = spec.stride, spec.groups, []
    for a, b in product(range(min(sh, H)), range(min(sw, W))):
        rows, cols = (taps(window, i) for window, i in zip(spec.windows, (a, b), strict=True))
        slot = (slice(None), slice(None), slice(a, None, sh), slice(b, None, sw))
        align = gcd(dx.align, (a * h + b * v) * ITEMSIZE[dx.dtype])
        part = Memory((N, C, -(-(H - a) // sh), -(-(W - b) // sw)), (n, c, h * sh, v * sw), dx.dtype, align)
        whole = Correlation(spec.C // groups, spec.K // groups, groups, rows, cols, g, w, part, precision, True)
        found.append(Phase(slot, simplified(whole) if rows.count and cols.count else None))
    return found


def taps(window: Window, a: int) -> Taps:
    """The filter rows that reach the input rows a, a + stride, ..., and the output rows that they come from."""
    st, dl = window.stride, window.dilation
    hits = [r for r in range(window.kernel) if (a + window.pad_lo - r * dl) % st == 0]
    if not hits:
        return Taps(0)
    step = st // gcd(st, dl)
    return Taps(len(hits), hits[0], step, 1, (a + window.pad_lo - hits[0] * dl) // st, -(step * dl // st))
