"""Who computes a `kernels.concat_channels`, what it refuses, what is made of it for a
GPU, who calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.comm.exchange_plan import AssemblyPlan
from hetconv.comm.redistribute import assemble
from hetconv.errors import KernelError
from hetconv.kernels import concat
from hetconv.sharding.layout import Box
from tests.compiled import check_wide_moves
from tests.interpreter import DEVICE, ON_GPU


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each of Triton's launches joined."""
    joined: list[int] = []
    run = concat.launch_concat

    def recorded(parts: Any, *rest: Any) -> Tensor:
        joined.append(len(parts))
        return run(parts, *rest)

    monkeypatch.setattr(concat, "launch_concat", recorded)
    return joined


def image(
    k: int, N: int = 2, dtype: torch.dtype = torch.float32, device: Any = DEVICE
) -> Tensor:
    return torch.ones(N, 3, 4, k, dtype=dtype, device=device).permute(0, 3, 1, 2)


def numbers(k: int, dtype: torch.dtype = torch.float32, device: Any = DEVICE) -> Tensor:
    return torch.ones(k, dtype=dtype, device=device)


def test_more_parts_than_the_kernel_takes_are_atens(by_triton: list[int]) -> None:
    parts = [image(k % 4) for k in range(17)]
    expected = torch.cat(parts, 1)
    assert kernels.concat_channels(parts).equal(expected)
    kernels.set_backend("triton")
    assert kernels.concat_channels(parts).equal(expected)
    assert by_triton == []
    assert kernels.concat_channels(parts[1:]).equal(expected)
    assert by_triton == [16]
    with pytest.raises(
        KernelError,
        match="asked of Triton, but it takes up to 16 parts, not 17; use backend='auto'",
    ):
        kernels.concat_channels(parts, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_other_dtypes_are_atens(dtype: torch.dtype) -> None:
    parts = [image(k, dtype=dtype) for k in (3, 5)]
    kernels.set_backend("triton")
    assert kernels.concat_channels(parts).equal(torch.cat(parts, 1))
    with pytest.raises(
        KernelError, match=f"computes in float16, bfloat16 and float32, not {dtype}"
    ):
        kernels.concat_channels(parts, backend="triton")


def test_other_devices_are_atens() -> None:
    parts = [image(k, device="meta") for k in (3, 5)]
    assert kernels.concat_channels(parts).shape == (2, 8, 3, 4)
    with pytest.raises(
        KernelError,
        match="asked of Triton, but Triton runs on CUDA tensors, not on meta",
    ):
        kernels.concat_channels(parts, backend="triton")


def test_auto_is_triton_on_a_gpu_alone(by_triton: list[int]) -> None:
    parts = [image(3), image(5)]
    kernels.concat_channels(parts)
    assert by_triton == [2] * ON_GPU
    kernels.set_backend("aten")
    kernels.concat_channels(parts)
    assert by_triton == [2] * ON_GPU
    kernels.concat_channels(parts, backend="triton")
    assert by_triton == [2] * ON_GPU + [2]


def test_float64_is_computed_in_float64() -> None:
    part = torch.full((1, 1, 1, 1), 1 + 2**-50, dtype=torch.float64)
    one = torch.ones(1)
    assert (
        kernels.concat_channels([part], scale=one, shift=one, residual=part).item()
        == 3 + 2**-49
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no parts": (lambda: {"parts": []}, r"one at least, not \[\]"),
    "parts of three dimensions": (
        lambda: {"parts": [image(3)[0]]},
        r"parts must be .* not \[\(3, 3, 4\)\]",
    ),
    "parts and sizes": (
        lambda: {"parts": [image(3)], "sizes": [3]},
        "sizes and image are of a flat buffer",
    ),
    "another image": (
        lambda: {"parts": [image(3), image(5, N=1)]},
        (
            r"part 1 is \(1, 5, 3, 4\) .* channels "
            r"alone"
        ),
    ),
    "another dtype": (
        lambda: {"parts": [image(3), image(5, dtype=torch.float16)]},
        ("part 1 is .* torch.float16 on .* torch.float32"),
    ),
    "another device": (
        lambda: {"parts": [image(3), image(5, device="meta")]},
        "part 1 is .* on meta, but part 0",
    ),
    "flat without sizes": (
        lambda: {"parts": numbers(96), "image": (2, 3, 4)},
        "needs the sizes of its parts",
    ),
    "flat without image": (
        lambda: {"parts": numbers(96), "sizes": (3, 1)},
        r"and the image = \(N, P, Q\)",
    ),
    "flat of another length": (
        lambda: {"parts": numbers(97), "sizes": (3, 1), "image": (2, 3, 4)},
        (
            r"flat buffer is \(97,\) .* sizes \(3, 1\) of an image \(2, 3, 4\) take a contiguous "
            r"one of 96 numbers"
        ),
    ),
    "flat with gaps": (
        lambda: {"parts": numbers(192)[::2], "sizes": (3, 1), "image": (2, 3, 4)},
        "contiguous one of 96",
    ),
    "flat of two dimensions": (
        lambda: {"parts": numbers(96).view(2, 48), "sizes": (3, 1), "image": (2, 3, 4)},
        r"flat buffer is \(2, 48\)",
    ),
    "negative sizes": (
        lambda: {"parts": numbers(48), "sizes": (3, -1), "image": (2, 3, 4)},
        r"sizes \(3, -1\)",
    ),
    "flat without parts": (
        lambda: {"parts": numbers(0), "sizes": (), "image": (2, 3, 4)},
        r"sizes \(\) of an image",
    ),
    "residual's shape": (
        lambda: {"residual": image(7)},
        (
            r"residual is \(2, 7, 3, 4\) .* must be "
            r"\(2, 8, 3, 4\)"
        ),
    ),
    "residual's dtype": (
        lambda: {"residual": image(8, dtype=torch.float16)},
        "residual is .*.float16 .*.float32",
    ),
    "residual's device": (
        lambda: {"residual": image(8, device="meta")},
        "residual is .* on meta, but must be",
    ),
    "scale's shape": (
        lambda: {"scale": numbers(7), "shift": numbers(8)},
        r"scale is \(7,\) .* must be \(8,\)",
    ),
    "shift's dtype": (
        lambda: {"scale": numbers(8), "shift": numbers(8, torch.float16)},
        ("shift is .*.float16 on .* in torch.float32"),
    ),
    "shift's device": (
        lambda: {"scale": numbers(8), "shift": numbers(8, device="meta")},
        "shift is .* on meta, but",
    ),
    "scale's gradient": (
        lambda: {"scale": numbers(8).requires_grad_(), "shift": numbers(8)},
        "in scale and shift is not differentiable.*no_grad",
    ),
    "activation": (
        lambda: {"activation": "tanh"},
        ("activation='tanh' is not known; give one of relu, relu6, .* None"),
    ),
    "backend": (
        lambda: {"backend": "cuda"},
        ("backend='cuda' is not known; give 'auto', 'triton' or 'aten'"),
    ),
    "out's shape": (
        lambda: {"out": image(7)},
        (
            r"out is \(2, 7, 3, 4\) .* but must be "
            r"\(2, 8, 3, 4\)"
        ),
    ),
    "out's dtype": (
        lambda: {"out": image(8, dtype=torch.float16)},
        "out is .* torch.float16 .* torch.float32",
    ),
    "out's device": (
        lambda: {"out": image(8, device="meta")},
        "out is .* on meta, but must be",
    ),
    "out's strides": (
        lambda: {"out": image(8).contiguous()},
        (
            r"out has strides \(96, 12, 4, 1\), but "
            r"its channels"
        ),
    ),
    "out's gradient": (
        lambda: {"out": image(8).requires_grad_()},
        "out= is not differentiable.*no_grad",
    ),
    "a part's gradient": (
        lambda: {"parts": [image(8).requires_grad_()], "out": image(8)},
        "out= is not differentiable.*no_grad",
    ),
    "the residual's gradient": (
        lambda: {"residual": image(8).requires_grad_(), "out": image(8)},
        "out= is not differentiable.*no_grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(KernelError, match=match):
        kernels.concat_channels(**({"parts": [image(3), image(5)]} | make()))


def test_without_gradients_a_slot_and_a_scale_that_want_them_are_taken() -> None:
    scale = numbers(8).requires_grad_()
    with torch.no_grad():
        out = image(8).requires_grad_()
        y = kernels.concat_channels(
            [image(8).requires_grad_()],
            scale=scale,
            shift=scale,
            out=out,
            backend="triton",
        )
    assert y is out
    assert y.eq(2).all()


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 0, 3), (1,) * 20], ids=str)
def test_slices_of_channels_that_arrive_are_joined(
    sizes: tuple[int, ...], backend: Any, by_triton: list[int]
) -> None:
    """In whatever order they arrived, within whatever box is wanted."""
    kernels.set_backend(backend)
    K, first = sum(sizes), 7
    whole = torch.randn(2, K, 3, 4, device=DEVICE)
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    boxes = [Box((0, first + a, 2, 0), (2, first + b, 5, 4)) for a, b in pairwise(ends)]
    fit = AssemblyPlan.to_fill(boxes[::-1], Box((0, first, 2, 0), (2, first + K, 5, 4)))
    found = assemble([whole[:, a:b] for a, b in pairwise(ends)][::-1], fit, whole)
    assert found.equal(whole)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert bool(by_triton) == (
        len(sizes) <= concat.MAX_PARTS and (backend == "triton" or ON_GPU)
    )


COMPILED = """
import json
from dataclasses import asdict
from bench.compile.suite import compile_one
from bench.concat.launches import concat_items
found = [
    item
    for item in concat_items((80, 90), quick=True)
    if item.epilogue == "scaled, relu" and item.case in ("wide parts", "narrow parts")
]
print(json.dumps({str(item): asdict(compile_one(item)) for item in found}))
"""


def test_compiled_for_gpus_it_moves_16_bytes_at_a_time_and_spills_nothing(
    tmp_path: Path,
) -> None:
    check_wide_moves(COMPILED, tmp_path, 8)
