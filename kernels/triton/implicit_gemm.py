"""Implicit GEMM: the two Triton kernels behind the forward pass and the input gradient.

y[n, p, q, m] = sum over i < R, j < S, c < C of
    w[m, R_FIRST + i R_STEP, S_FIRST + j S_STEP, c]
    x[n, p STRIDE_H + OFFSET_H + i DILATION_H, q STRIDE_W + OFFSET_W + j DILATION_W, c]

is a matrix product of filters (M rows) by pixels (N P Q columns), reduced over taps and
channels; the matrix of input pixels is never stored, but gathered tile by tile. The
forward pass reads filters w[m = k, c]; the input gradient reads them transposed,
w[m = c, c = k]. Sums are in float32. SPLIT_K programs may share a reduction: each stores
a partial sum, which `split_k` adds in a fixed order, without atomics. The epilogue
stores activation(scale[m] sum + shift[m] + residual[n, p, q, m]), each where given.

Parameters of these kernels, which `wgrad`, `split_k` and `conv2d_parts` share:

    x, w, y, residual, g, dw    pointers to tensors whose channels lie side by side, or
                                tensor descriptors of them (TMA)
    scale, shift                pointers to a float32 number per channel m
    N, P, Q, H, W               samples; rows and columns of the output and of the input
    pixels                      N P Q
    M                           output channels of a group, in units of M_UNIT
    stride_xn, stride_xh, ...   strides of tensor x (w, y, g, r for the residual) from
                                sample to sample (n), row to row (h, p), column to column
                                (w, q), tap to tap (r, s), filter to filter (k), in units
                                of X_UNIT (W_UNIT, ...) elements
    stride_wg                   stride from one group's filters to the next group's
    stride_yz                   stride from one split's partial sums to the next's
    X_UNIT, ..., M_UNIT         common divisors, which the compiler then knows: loads and
                                stores of that many elements are aligned
    C                           input channels of a group
    R, S                        rows and columns of taps
    R_FIRST, R_STEP             row of the filter that the first tap is, and rows from
                                tap to tap; S_FIRST and S_STEP likewise
    STRIDE_H, OFFSET_H          input rows from output to output, and input row that
                                output row 0 reads through the first tap
    DILATION_H                  input rows from tap to tap; all three likewise for W
    W_TRANSPOSED                whether the reduction is over the filters' first dimension
    PACKED                      whether the S C numbers below a filter row, which lie side
                                by side in the input too, count as C channels of one tap;
                                columns of the input then count numbers
    INT64                       whether addresses take 64 bits
    PRECISION                   "ieee" or "tf32", for float32 products
    HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE    the epilogue
    BLOCK_M, BLOCK_N, BLOCK_K   results of an accumulator (m by n), and reduced in one step
    MORE_M                      rows m of a second accumulator, which shares the pixels; 0
                                if there is none
    SPLIT_K                     programs that share a reduction
"""

import triton
import triton.language as tl

from .device_functions import (
    activate,
    load_float32,
    mask_of_taps,
    pixel_position,
    scale_and_shift,
)


@triton.jit
def filter_block(
    w, m, c, stride_wk, W_UNIT: tl.constexpr, W_TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Returns the addresses of filters m at channels c, (c, m), of tap 0."""
    if W_TRANSPOSED:
        at = m[None, :] + (c * stride_wk)[:, None] * W_UNIT
    else:
        at = (m * stride_wk)[None, :] * W_UNIT + c[:, None]
    return w + at


@triton.jit
def filter_mask(m_ok, c, C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns which of the filters at channels c exist, (1 or c, m)."""
    ok = m_ok[None, :]
    if C % BLOCK_K:
        ok = ok & (c < C)[:, None]
    return ok


@triton.jit
def finish_and_store(
    acc, y_block, r_block, scale, shift, inside, m, M,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to an accumulator and stores it.

    Args:
        acc: Float32 block (pixels, channels).
        y_block: Addresses of the result's pixels (pixels, 1).
        r_block: Addresses of the residual's pixels (pixels, 1).
        scale: Pointer to the group's factors.
        shift: Pointer to the group's summands.
        inside: Which pixels exist (pixels).
        m: Numbers of the channels.
        M: Channels of the group.
        HAS_SCALE: The epilogue, see the module's docstring, as are the others.
    """
    acc = scale_and_shift(acc, scale, shift, m, m < M, HAS_SCALE, HAS_SHIFT, AXIS=0)
    stored = inside[:, None] & (m < M)[None, :]
    if HAS_RESIDUAL:
        acc += load_float32(r_block + m[None, :], stored)
    acc = activate(acc, ACTIVATION, SLOPE)
    tl.store(y_block + m[None, :], acc.to(y_block.dtype.element_ty), mask=stored)


@triton.jit
def implicit_gemm_pointers(
    x, w, y, scale, shift, residual,
    pixels, P, Q, H, W, M,
    stride_xn, stride_xh, stride_xw,
    stride_wg, stride_wk, stride_wr, stride_ws,
    stride_yz, stride_yn, stride_yp, stride_yq,
    stride_rn, stride_rp, stride_rq,
    C: tl.constexpr,
    R: tl.constexpr, R_FIRST: tl.constexpr, R_STEP: tl.constexpr,
    S: tl.constexpr, S_FIRST: tl.constexpr, S_STEP: tl.constexpr,
    STRIDE_H: tl.constexpr, OFFSET_H: tl.constexpr, DILATION_H: tl.constexpr,
    STRIDE_W: tl.constexpr, OFFSET_W: tl.constexpr, DILATION_W: tl.constexpr,
    X_UNIT: tl.constexpr, W_UNIT: tl.constexpr, Y_UNIT: tl.constexpr,
    RESIDUAL_UNIT: tl.constexpr, M_UNIT: tl.constexpr,
    W_TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of y (BLOCK_N pixels by its channels) through pointers and masks.

    It takes any stride, dilation and number of channels. Parameters are explained in
    the module's docstring.
    """
    M = M * M_UNIT
    tiles_m = tl.cdiv(M, BLOCK_M + MORE_M)
    pid = tl.program_id(0)  # channels fastest: programs that share input run together
    z = tl.program_id(1)
    g = tl.program_id(2)
    block = (pid // tiles_m).to(tl.int64) if INT64 else pid // tiles_m
    pixel = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m0 = (pid % tiles_m) * (BLOCK_M + MORE_M)
    m = m0 + tl.arange(0, BLOCK_M)
    n, p, q = pixel_position(pixel, P, Q)
    h = p * STRIDE_H + OFFSET_H
    v = q * STRIDE_W + OFFSET_W
    inside = pixel < pixels
    taps = mask_of_taps(
        h, v, inside, H, W, R, S, DILATION_H, DILATION_W, PACKED, BLOCK_N
    )
    c = tl.arange(0, BLOCK_K)
    x_block = (
        x + g * C
        + (n * stride_xn + h * stride_xh + v * stride_xw)[:, None] * X_UNIT + c[None, :]
    )  # fmt: skip
    if PACKED:  # stride_xw is 1 and v counts numbers
        x_block = (
            x + (n * stride_xn + h * stride_xh)[:, None] * X_UNIT + v[:, None] + c[None, :]
        )  # fmt: skip
    w += g * stride_wg * W_UNIT
    w_block = filter_block(w, m, c, stride_wk, W_UNIT, W_TRANSPOSED)
    C_BLOCKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (R * S * C_BLOCKS + SPLIT_K - 1) // SPLIT_K
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if MORE_M:
        more_m = m0 + BLOCK_M + tl.arange(0, MORE_M)
        more_block = filter_block(w, more_m, c, stride_wk, W_UNIT, W_TRANSPOSED)
        more = tl.zeros((BLOCK_N, MORE_M), dtype=tl.float32)
    for it in range(z * STEPS, min(z * STEPS + STEPS, R * S * C_BLOCKS)):
        tap = tl.cast(it // C_BLOCKS, tl.int64) if INT64 else it // C_BLOCKS
        c0 = (it % C_BLOCKS) * BLOCK_K
        i = tap // S
        j = tap % S
        x_ok = ((taps >> tap) & 1 != 0)[:, None]
        if PACKED:
            at = v[:, None] + (c0 + c)[None, :]
            x_ok = x_ok & (at >= 0) & (at < W)
        if C % BLOCK_K:
            x_ok = x_ok & (c0 + c < C)[None, :]
        x_step = (i * DILATION_H * stride_xh + j * DILATION_W * stride_xw) * X_UNIT + c0
        x_tile = tl.load(x_block + x_step, mask=x_ok, other=0.0)
        w_tap = (R_FIRST + i * R_STEP) * stride_wr + (S_FIRST + j * S_STEP) * stride_ws
        w_step = w_tap * W_UNIT + (c0 * stride_wk * W_UNIT if W_TRANSPOSED else c0)
        w_ok = filter_mask(m < M, c0 + c, C, BLOCK_K)
        w_tile = tl.load(w_block + w_step, mask=w_ok, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
        if MORE_M:
            more_ok = filter_mask(more_m < M, c0 + c, C, BLOCK_K)
            w_tile_more = tl.load(more_block + w_step, mask=more_ok, other=0.0)
            more = tl.dot(x_tile, w_tile_more, more, input_precision=PRECISION)
    y += tl.cast(z, tl.int64) * stride_yz + g * M
    y_block = y + (n * stride_yn + p * stride_yp + q * stride_yq)[:, None] * Y_UNIT
    r_pixel = (n * stride_rn + p * stride_rp + q * stride_rq)[:, None]
    r_block = residual + g * M + r_pixel * RESIDUAL_UNIT
    finish_and_store(
        acc, y_block, r_block, scale + g * M, shift + g * M, inside, m, M,
        HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE,
    )  # fmt: skip
    if MORE_M:
        finish_and_store(
            more, y_block, r_block, scale + g * M, shift + g * M, inside, more_m, M,
            HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE,
        )  # fmt: skip


@triton.jit
def implicit_gemm_tma(
    x, w, w_more, y, scale, shift, residual,
    N, P, Q, M,
    stride_yz, stride_yn, stride_yp, stride_yq,
    stride_rn, stride_rp, stride_rq,
    C: tl.constexpr,
    R: tl.constexpr, R_FIRST: tl.constexpr, R_STEP: tl.constexpr,
    S: tl.constexpr, S_FIRST: tl.constexpr, S_STEP: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET_H: tl.constexpr, DILATION_H: tl.constexpr,
    OFFSET_W: tl.constexpr, DILATION_W: tl.constexpr,
    X_CHANNELS: tl.constexpr,
    Y_UNIT: tl.constexpr, RESIDUAL_UNIT: tl.constexpr, M_UNIT: tl.constexpr,
    W_TRANSPOSED: tl.constexpr, INT64: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    BOX_N: tl.constexpr, BOX_P: tl.constexpr, BOX_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of y (a box of pixels by its channels) through TMA descriptors.

    Hopper's copy engine fetches boxes of pixels and fills zeros out of bounds, so that
    nothing is masked. x describes (N, H, W, C), or at stride 2 the view
    (2, N, H / 2, W / 2, 2 X_CHANNELS), whose first dimension is a row's parity; w
    describes (R, S, M, C), or transposed (R, S, C, M), w_more the same with boxes of
    MORE_M filters. Filters are the left operand: a box folds into a view of shared memory
    only as the right one.

    Other parameters than those of the module's docstring are STRIDE, 1 or 2, of both
    dimensions; X_CHANNELS, the channels of all groups in x; BOX_N, BOX_P and BOX_Q, the
    samples, rows and columns of a box, whose product is the pixels of a tile.
    """
    M = M * M_UNIT
    BLOCK_N: tl.constexpr = BOX_N * BOX_P * BOX_Q
    tiles_m = tl.cdiv(M, BLOCK_M + MORE_M)
    tiles_q = tl.cdiv(Q, BOX_Q)
    tiles_p = tl.cdiv(P, BOX_P)
    pid = tl.program_id(0)
    z = tl.program_id(1)
    g = tl.program_id(2)
    m0 = (pid % tiles_m) * (BLOCK_M + MORE_M)
    box = pid // tiles_m
    q0 = (box % tiles_q) * BOX_Q
    p0 = (box // tiles_q) % tiles_p * BOX_P
    n0 = box // tiles_q // tiles_p * BOX_N
    C_BLOCKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (R * S * C_BLOCKS + SPLIT_K - 1) // SPLIT_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if MORE_M:
        more = tl.zeros((MORE_M, BLOCK_N), dtype=tl.float32)
    for it in range(z * STEPS, min(z * STEPS + STEPS, R * S * C_BLOCKS)):
        tap = it // C_BLOCKS
        c0 = (it % C_BLOCKS) * BLOCK_K
        i = tap // S
        j = tap % S
        h = OFFSET_H + i * DILATION_H
        v = OFFSET_W + j * DILATION_W
        if STRIDE == 1:
            x_tile = x.load([n0, p0 + h, q0 + v, g * C + c0])
        else:  # an arithmetic shift halves negative numbers downwards
            channel = (v & 1) * X_CHANNELS + g * C + c0
            x_tile = x.load([h & 1, n0, p0 + (h >> 1), q0 + (v >> 1), channel])
        x_tile = x_tile.reshape(BLOCK_N, BLOCK_K)
        r = R_FIRST + i * R_STEP
        s = S_FIRST + j * S_STEP
        if W_TRANSPOSED:
            w_tile = w.load([r, s, g * C + c0, m0]).reshape(BLOCK_K, BLOCK_M).T
        else:
            w_tile = w.load([r, s, g * M + m0, c0]).reshape(BLOCK_M, BLOCK_K)
        acc = tl.dot(w_tile, x_tile.T, acc, input_precision=PRECISION)
        if MORE_M:
            m1 = m0 + BLOCK_M
            if W_TRANSPOSED:
                w_tile_more = w_more.load([r, s, g * C + c0, m1])
                w_tile_more = w_tile_more.reshape(BLOCK_K, MORE_M).T
            else:
                w_tile_more = w_more.load([r, s, g * M + m1, c0])
                w_tile_more = w_tile_more.reshape(MORE_M, BLOCK_K)
            more = tl.dot(w_tile_more, x_tile.T, more, input_precision=PRECISION)
    e = tl.arange(0, BLOCK_N)
    q = q0 + e % BOX_Q
    p = p0 + e // BOX_Q % BOX_P
    n = n0 + e // (BOX_Q * BOX_P)
    inside = (q < Q) & (p < P) & (n < N)
    if INT64:
        n = n.to(tl.int64)
        p = p.to(tl.int64)
        q = q.to(tl.int64)
    y += tl.cast(z, tl.int64) * stride_yz + g * M
    y_block = y + (n * stride_yn + p * stride_yp + q * stride_yq)[:, None] * Y_UNIT
    r_pixel = (n * stride_rn + p * stride_rp + q * stride_rq)[:, None]
    r_block = residual + g * M + r_pixel * RESIDUAL_UNIT
    m = m0 + tl.arange(0, BLOCK_M)
    finish_and_store(
        acc.T, y_block, r_block, scale + g * M, shift + g * M, inside, m, M,
        HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE,
    )  # fmt: skip
    if MORE_M:
        more_m = m0 + BLOCK_M + tl.arange(0, MORE_M)
        finish_and_store(
            more.T, y_block, r_block, scale + g * M, shift + g * M, inside, more_m, M,
            HAS_SCALE, HAS_SHIFT, HAS_RESIDUAL, ACTIVATION, SLOPE,
        )  # fmt: skip
