"""Who computes a `kernels.conv2d_parts`, where its result goes, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels import Tile, dispatch
from hetconv.kernels import concat as channels
from hetconv.kernels.triton import conv2d_parts
from hetconv.kernels.triton.concat import concat
from hetconv.kernels.triton.implicit_gemm import implicit_gemm_pointers
from tests import ROOT
from tests.interpreter import (
    BOUNDS,
    DEVICE,
    ON_GPU,
    POINTER,
    TMA,
    assert_close,
    images,
    skip_unless_it_runs,
    tensors,
)

from .test_epilogue import definition, ends
from .triton.test_conv2d_parts import SPEC, WIDTHS, called, launching, separate
from .triton.test_strided_tensors import PLACES, Margins, placed

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("margins", PLACES.values(), ids=list(PLACES))
def test_a_result_fills_its_slot_and_nothing_else(
    margins: Margins, backend: str
) -> None:
    t = tensors(SPEC)
    slot = placed(t.g, margins).fill_(torch.nan)
    whole = slot._base
    assert whole is not None
    how: dict[str, Any] = {
        "backend": backend,
        "tile": POINTER if backend == "triton" else None,
    }
    parts = separate(t.x, WIDTHS[SPEC])
    assert called(SPEC, parts, t, out=slot, **how) is slot
    assert slot.equal(called(SPEC, parts, t, **how))
    assert whole.isfinite().sum() == slot.numel()


@pytest.mark.parametrize(
    ("backend", "empty"),
    [("triton", "N"), ("triton", "C"), ("triton", "K"), ("aten", "N")],
)
def test_empty_convolutions(backend: str, empty: str) -> None:
    size = {"N": 2, "C": 16, "K": 24, empty: 0}
    spec = replace(
        images(size["C"], size["K"], (6, 5), 3, 3, dtype="float16"), N=size["N"]
    )
    t = tensors(spec)
    added = ends(spec)
    y = called(
        spec, [t.x[:, :0], t.x], t, True, backend=backend, activation="relu", **added
    )
    assert_close(y, definition(spec, t, True, "relu", **added), BOUNDS["float16"])


def launched(**how: Any) -> list[Any]:
    t = tensors(SPEC)
    with launching() as seen:
        called(SPEC, separate(t.x, WIDTHS[SPEC]), t, **how)
    return [kernel for kernel, _ in seen]


def test_who_computes() -> None:
    """The kernel of segments where Triton is asked for, here or for all; else who joins
    channels and who convolves.
    """
    assert launched(backend="aten") == []
    assert launched(backend="auto") == [concat] * ON_GPU
    assert launched(backend="auto", tile=POINTER) == [concat] * ON_GPU + [
        implicit_gemm_pointers
    ]
    assert launched(backend="triton") == [conv2d_parts.implicit_gemm_parts]
    kernels.set_backend("triton")
    assert launched(backend="auto") == [conv2d_parts.implicit_gemm_parts]
    assert launched(backend="aten") == []


SPLIT = replace(POINTER, split_k=3)
UNABLE: dict[str, tuple[tuple[int, ...], Tile | None, str]] = {
    "many parts": (
        (*[0] * 15, 8, 16),
        None,
        "of Triton, but it takes up to 16 parts, not 17; use backend='auto'",
    ),
    "splits": (
        (8, 16),
        SPLIT,
        "it takes tiles of pointers without split-k, not pointer:64x128x32:4w2s3z",
    ),
    "tma": (
        (8, 16),
        TMA,
        "it takes tiles of pointers without split-k, not tma:64x64x16:4w2s1z",
    ),
}


@pytest.mark.parametrize("name", UNABLE)
def test_what_the_kernel_cannot_is_refused_or_joined(name: str) -> None:
    widths, tile, said = UNABLE[name]
    skip_unless_it_runs(tile or POINTER)
    t = tensors(SPEC)
    parts = separate(t.x, widths)
    with pytest.raises(KernelError, match=said):
        called(SPEC, parts, t, tile=tile)
    kernels.set_backend("triton")
    with launching() as seen:
        y = called(SPEC, parts, t, tile=tile, backend="auto")
    assert_close(y, definition(SPEC, t, True, None), BOUNDS["float16"])
    assert seen
    assert conv2d_parts.implicit_gemm_parts not in [kernel for kernel, _ in seen]


def test_other_dtypes_are_atens() -> None:
    spec = replace(SPEC, dtype="float64")
    t = tensors(spec)
    parts = separate(t.x, WIDTHS[SPEC])
    assert_close(
        called(spec, parts, t, backend="auto"), definition(spec, t, True, None), 1e-12
    )
    with pytest.raises(
        KernelError,
        match="float16, bfloat16 and float32, not float64; use backend='auto'",
    ):
        called(spec, parts, t)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (channels, dispatch):
        monkeypatch.setattr(
            room, "unavailable_reason", lambda device: "triton is not installed"
        )
    t = tensors(SPEC)
    x = separate(t.x, WIDTHS[SPEC])
    assert_close(
        called(SPEC, x, t, backend="auto"),
        definition(SPEC, t, True, None),
        BOUNDS["float16"],
    )
    with pytest.raises(
        KernelError,
        match="asked of Triton, but triton is not installed; use backend='auto'",
    ):
        called(SPEC, x, t)


def changed(**changes: Any) -> dict[str, Any]:
    t = tensors(SPEC)
    return {
        "parts": separate(t.x, (8, 16)),
        "weight": t.w,
        "bias": t.bias,
        "padding": 1,
    } | changes


def ones(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no parts": (lambda: {"parts": []}, r"one at least, not \[\]"),
    "one tensor": (
        lambda: {"parts": ones(2, 24, 6, 5)},
        (
            r"parts must be .* not \[\(24, 6, 5\), "
            r"\(24, 6, 5\)\]"
        ),
    ),
    "another image": (
        lambda: {"parts": [ones(2, 8, 6, 5), ones(2, 16, 6, 4)]},
        (
            r"part 1 is \(2, 16, 6, 4\) .* channels "
            r"alone"
        ),
    ),
    "another dtype": (
        lambda: {"parts": [ones(2, 8, 6, 5), ones(2, 16, 6, 5, dtype=torch.float32)]},
        "part 1 is .* torch.float32",
    ),
    "too few channels": (
        lambda: {"parts": [ones(2, 8, 6, 5)]},
        "x has 8 channels, so in 1 groups weight",
    ),
    "weight of another dtype": (
        lambda: {"weight": ones(40, 24, 3, 3, dtype=torch.float32)},
        "weight is .* torch.float32",
    ),
    "bias of another size": (
        lambda: {"bias": ones(3)},
        (
            r"bias has shape \(3,\), but there are 40 "
            r"filters"
        ),
    ),
    "three strides": (
        lambda: {"stride": (1, 1, 1)},
        (
            r"stride=\(1, 1, 1\) does not fit a 2-D "
            r"convolution"
        ),
    ),
    "no dilation": (lambda: {"dilation": 0}, "dilation .* must be at least 1"),
    "a large filter": (
        lambda: {"padding": 0, "dilation": 3},
        "6 x 5 .* is smaller than the filter",
    ),
    "scale in half precision": (
        lambda: {"scale": ones(40)},
        (
            r"scale is \(40,\) .* must be \(40,\) in "
            r"torch.float32"
        ),
    ),
    "another residual": (
        lambda: {"residual": ones(2, 40, 6, 4)},
        (
            r"residual is \(2, 40, 6, 4\).* must be "
            r"\(2, 40, 6, 5\)"
        ),
    ),
    "another activation": (
        lambda: {"activation": "swish"},
        ("activation='swish' is not known; give one of relu"),
    ),
    "another out": (
        lambda: {"out": ones(2, 40, 6, 4)},
        (
            r"out is \(2, 40, 6, 4\).* must be "
            r"\(2, 40, 6, 5\)"
        ),
    ),
    "out in NCHW": (
        lambda: {"out": ones(2, 40, 6, 5)},
        ("out has strides .* channels must lie beside each other"),
    ),
    "another backend": (lambda: {"backend": "cudnn"}, "backend='cudnn' is not known"),
    "a tile for ATen": (
        lambda: {"backend": "aten", "tile": POINTER},
        "tile .* was given with backend='aten'",
    ),
    "a tile that does not fit": (
        lambda: {"backend": "triton", "tile": Tile("pointer", 256, 256, 128, 8, 4)},
        "needs more shared memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_what_does_not_fit_is_refused(backend: str, name: str) -> None:
    wrong, said = REFUSED[name]
    with pytest.raises(KernelError, match=said):
        kernels.conv2d_parts(**changed(**{"backend": backend} | wrong()))


@pytest.mark.parametrize(
    "name", ["parts", "weight", "bias", "scale", "shift", "residual", "out"]
)
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_it_is_not_differentiable(backend: str, name: str) -> None:
    given = changed(backend=backend, **ends(SPEC), out=tensors(SPEC).g)
    (given["parts"][1] if name == "parts" else given[name]).requires_grad_()
    with pytest.raises(
        KernelError,
        match="not differentiable, but an argument requires a gradient; call it under",
    ):
        kernels.conv2d_parts(**given)
    with torch.no_grad():
        kernels.conv2d_parts(**given)


def test_nothing_that_loads_triton_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, torch; from hetconv import kernels\n"
        "kernels.conv2d_parts([torch.ones(1, 2, 3, 3), torch.ones(1, 1, 3, 3)], torch.ones(4, "
        "3, 3, 3))\n"
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
