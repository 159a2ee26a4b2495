"""The two Triton kernels behind forward and input gradient: a correlation whose taps
step evenly over the input.

y[n, p, q, m] = sum over i < R, j < S, c < C of
                w[m, R0 + i RD, S0 + j SD, c] x[n, p HS + H0 + i HD, q WS + W0 + j WD, c]

Forward reads filters w[m = k, c]; the input gradient reads them transposed, w[m = c, c
= k]. Sums are in float32, and a split of the reduction over programs leaves one partial
result each, which `sums` adds in order: no atomics. What is stored is
activation(scale[m] sum + shift[m] + residual[n, p, q, m]), each as wanted.
"""

import triton
import triton.language as tl

from .activations import activated


@triton.jit
def by_pointers(
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
    wg,
    wo,
    wr,
    ws,
    yz,
    yn,
    yp,
    yq,
    rn,
    rp,
    rq,
    C: tl.constexpr,
    R: tl.constexpr,
    R0: tl.constexpr,
    RD: tl.constexpr,
    S: tl.constexpr,
    S0: tl.constexpr,
    SD: tl.constexpr,
    HS: tl.constexpr,
    H0: tl.constexpr,
    HD: tl.constexpr,
    WS: tl.constexpr,
    W0: tl.constexpr,
    WD: tl.constexpr,
    XU: tl.constexpr,
    WU: tl.constexpr,
    YU: tl.constexpr,
    RU: tl.constexpr,
    MU: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    NUMBERS: tl.constexpr,
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
    SPLITS: tl.constexpr,
):
    """Any stride, dilation and channel count: pixels are rows of the product, addresses
    and masks are computed.

    Strides and M count in units XU, WU, YU, MU, whose divisibility the compiler then
    knows. NUMBERS: a filter row's S * C numbers lie side by side in the input as well
    and count as C channels of one tap; columns count numbers.
    """
    M = M * MU
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)  # channels fastest: programs that share input run together
    z = tl.program_id(1)
    g = tl.program_id(2)
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
            hit = row if NUMBERS else row & (v + b * WD >= 0) & (v + b * WD < W)
            taken |= hit.to(taken.dtype) << (a * S + b)
    c = tl.arange(0, BLOCK_K)
    x_block = x + g * C + (n * xn + h * xh + v * xw)[:, None] * XU + c[None, :]
    if NUMBERS:  # xw is 1 and v counts numbers
        x_block = x + (n * xn + h * xh)[:, None] * XU + v[:, None] + c[None, :]
    if TRANSPOSED:
        w_block = w + (g * wg) * WU + m[None, :] + (c * wo)[:, None] * WU
    else:
        w_block = w + (g * wg) * WU + (m * wo)[None, :] * WU + c[:, None]
    CB: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    EACH: tl.constexpr = (R * S * CB + SPLITS - 1) // SPLITS
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for it in range(z * EACH, min(z * EACH + EACH, R * S * CB)):
        tap = tl.cast(it // CB, tl.int64) if WIDE else it // CB
        c0 = (it % CB) * BLOCK_K
        i = tap // S
        j = tap % S
        x_ok = ((taken >> tap) & 1 != 0)[:, None]
        if NUMBERS:
            at = v[:, None] + (c0 + c)[None, :]
            x_ok = x_ok & (at >= 0) & (at < W)
        w_ok = (m < M)[None, :]
        if C % BLOCK_K:
            x_ok = x_ok & (c0 + c < C)[None, :]
            w_ok = w_ok & (c0 + c < C)[:, None]
        x_tile = tl.load(
            x_block + ((i * HD * xh + j * WD * xw) * XU + c0), mask=x_ok, other=0.0
        )
        w_step = ((R0 + i * RD) * wr + (S0 + j * SD) * ws) * WU + (
            c0 * wo * WU if TRANSPOSED else c0
        )
        w_tile = tl.load(w_block + w_step, mask=w_ok, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(scale + g * M + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    if SHIFTED:
        acc += tl.load(shift + g * M + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    stored = inside[:, None] & (m < M)[None, :]
    if ADDED:
        r_block = (
            residual + g * M + (n * rn + p * rp + q * rq)[:, None] * RU + m[None, :]
        )
        acc += tl.load(r_block, mask=stored, other=0.0).to(tl.float32)
    acc = activated(acc, ACTIVATION, SLOPE)
    y_block = (
        y
        + tl.cast(z, tl.int64) * yz
        + g * M
        + (n * yn + p * yp + q * yq)[:, None] * YU
        + m[None, :]
    )
    tl.store(y_block, acc.to(y.dtype.element_ty), mask=stored)


@triton.jit
def by_boxes(
    x,
    w,
    y,
    scale,
    shift,
    residual,
    N,
    P,
    Q,
    M,
    yz,
    yn,
    yp,
    yq,
    rn,
    rp,
    rq,
    C: tl.constexpr,
    R: tl.constexpr,
    R0: tl.constexpr,
    RD: tl.constexpr,
    S: tl.constexpr,
    S0: tl.constexpr,
    SD: tl.constexpr,
    STRIDE: tl.constexpr,
    H0: tl.constexpr,
    HD: tl.constexpr,
    W0: tl.constexpr,
    WD: tl.constexpr,
    XC: tl.constexpr,
    YU: tl.constexpr,
    RU: tl.constexpr,
    MU: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    BOX_N: tl.constexpr,
    BOX_P: tl.constexpr,
    BOX_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Hopper: boxes of pixels come by the copy engine, which fills zeros out of bounds;
    operands swapped.

    x describes (N, H, W, C), or at stride 2 the view (2, N, H/2, W/2, 2 XC); w
    describes (R, S, M, C), or (R, S, C, M) transposed. Filters are the left operand: a
    box folds into a shared-memory view only as the right one.
    """
    M = M * MU
    BLOCK_N: tl.constexpr = BOX_N * BOX_P * BOX_Q
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_q = tl.cdiv(Q, BOX_Q)
    tiles_p = tl.cdiv(P, BOX_P)
    pid = tl.program_id(0)
    z = tl.program_id(1)
    g = tl.program_id(2)
    m0 = (pid % tiles_m) * BLOCK_M
    box = pid // tiles_m
    q0 = (box % tiles_q) * BOX_Q
    p0 = (box // tiles_q) % tiles_p * BOX_P
    n0 = box // tiles_q // tiles_p * BOX_N
    CB: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    EACH: tl.constexpr = (R * S * CB + SPLITS - 1) // SPLITS
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for it in range(z * EACH, min(z * EACH + EACH, R * S * CB)):
        tap = it // CB
        c0 = (it % CB) * BLOCK_K
        i = tap // S
        j = tap % S
        h = H0 + i * HD
        v = W0 + j * WD
        if STRIDE == 1:
            x_tile = x.load([n0, p0 + h, q0 + v, g * C + c0])
        else:  # an arithmetic shift halves negative numbers downwards
            x_tile = x.load(
                [h & 1, n0, p0 + (h >> 1), q0 + (v >> 1), (v & 1) * XC + g * C + c0]
            )
        x_tile = x_tile.reshape(BLOCK_N, BLOCK_K)
        if TRANSPOSED:
            w_tile = (
                w.load([R0 + i * RD, S0 + j * SD, g * C + c0, m0])
                .reshape(BLOCK_K, BLOCK_M)
                .T
            )
        else:
            w_tile = w.load([R0 + i * RD, S0 + j * SD, g * M + m0, c0]).reshape(
                BLOCK_M, BLOCK_K
            )
        acc = tl.dot(w_tile, x_tile.T, acc, input_precision=PRECISION)
    m = m0 + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_N)
    q = q0 + e % BOX_Q
    p = p0 + e // BOX_Q % BOX_P
    n = n0 + e // (BOX_Q * BOX_P)
    if SCALED:
        acc *= tl.load(scale + g * M + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    if SHIFTED:
        acc += tl.load(shift + g * M + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    stored = ((q < Q) & (p < P) & (n < N))[:, None] & (m < M)[None, :]
    if WIDE:
        n = n.to(tl.int64)
        p = p.to(tl.int64)
        q = q.to(tl.int64)
    y_block = (
        y
        + tl.cast(z, tl.int64) * yz
        + g * M
        + (n * yn + p * yp + q * yq)[:, None] * YU
        + m[None, :]
    )
    out = acc.T
    if ADDED:
        r_block = (
            residual + g * M + (n * rn + p * rp + q * rq)[:, None] * RU + m[None, :]
        )
        out += tl.load(r_block, mask=stored, other=0.0).to(tl.float32)
    tl.store(
        y_block, activated(out, ACTIVATION, SLOPE).to(y.dtype.element_ty), mask=stored
    )
