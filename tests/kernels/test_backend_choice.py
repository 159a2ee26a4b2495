"""Who computes a convolution, and what is refused, by messages that say what was given
and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.errors import HetConvError, KernelError
from hetconv.kernels import Tile, tiles
from hetconv.kernels.backend_choice import (
    ATEN,
    KernelQuery,
    Route,
    choose,
    unsupported_reason,
)
from hetconv.sharding.conv_spec import ConvSpec
from tests.interpreter import DEVICE, ON_GPU, SAME, multiplying_in

TILE = Tile("pointer", 16, 64, 16, 4, 2)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing tuned, nothing set, float32 exact."""
    monkeypatch.setattr(tiles.tuned, "_installed", {})
    with multiplying_in("ieee"):
        yield
    kernels.set_backend("auto")


def zeros(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = DEVICE
) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


X, W, B = (zeros(2, 8, 6, 5), zeros(12, 8, 3, 3), zeros(12))
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no batch": (
        (X[0], W),
        {},
        r"takes x \(N, C, H, W\) and weight .* not \(8, 6, 5\)",
    ),
    "a flat filter": ((X, W[0]), {}, r"takes x .* \(8, 3, 3\) in torch.float32"),
    "channels": (
        (X, W[:, 1:]),
        {},
        r"x has 8 channels.* in 1 groups.* but it is \(12, 7, 3, 3\)",
    ),
    "groups": (
        (X, W[:, :2]),
        {"groups": 3},
        (
            r"x has 8 channels.* in 3 groups.* it is \(12, 2, "
            r"3, 3\)"
        ),
    ),
    "no group": ((X, W), {"groups": 0}, r"in 0 groups"),
    "filters in groups": (
        (X, W[:3, :4]),
        {"groups": 2},
        (
            r"a multiple of 2 filters, but it is \(3, "
            r"4, 3, 3\)"
        ),
    ),
    "two dtypes": (
        (X, W.half()),
        {},
        (
            r"weight is .* torch.float16 on .*, but x is .* "
            r"torch.float32"
        ),
    ),
    "bias dtype": (
        (X, W, B.half()),
        {},
        (
            r"bias is \(12,\) in torch.float16 .* give both in "
            r"one dtype"
        ),
    ),
    "bias shape": (
        (X, W, B[1:]),
        {},
        r"bias has shape \(11,\), but there are 12 filters",
    ),
    "two devices": ((X, W.to("meta")), {}, r"weight is .* on meta, but x is .* on c"),
    "stride 0": ((X, W), {"stride": 0}, r"stride \(0, 0\) .* must be at least 1"),
    "three strides": (
        (X, W),
        {"stride": (1, 1, 1)},
        (
            r"stride=\(1, 1, 1\) does not fit .* one "
            r"or two integers"
        ),
    ),
    "dilation 0": (
        (X, W),
        {"dilation": (1, 0)},
        r"dilation \(1, 0\) must be at least 1",
    ),
    "negative padding": (
        (X, W),
        {"padding": ((0, -1), (0, 0))},
        (
            r"and padding \(\(0, -1\), \(0, 0\)\) at "
            r"least 0"
        ),
    ),
    "a filter larger than the image": (
        (X, W),
        {"dilation": 3},
        (
            r"an image of 6 x 5 .* smaller than the "
            r"filter, 3 x 3"
        ),
    ),
    "an unknown backend": (
        (X, W),
        {"backend": "cuda"},
        ("backend='cuda' is not known; give 'auto', 'triton' or"),
    ),
    "a tile for ATen": (
        (X, W),
        {"backend": "aten", "tile": TILE},
        (
            r"tile pointer:16x64x16:4w2s1z .* no "
            r"tiles"
        ),
    ),
    "float64": (
        (X.double(), W.double()),
        {"backend": "triton"},
        (
            r"float16, bfloat16 and float32, not "
            r"float64"
        ),
    ),
    "integers": (
        (X.int(), W.int()),
        {"backend": "triton"},
        (
            r"compute in float16, bfloat16 and "
            r"float32, not int32"
        ),
    ),
    "65 taps": (
        (zeros(1, 1, 13, 5), zeros(1, 1, 13, 5)),
        {"backend": "triton"},
        r"filters of up to 63 taps, not 13 x 5",
    ),
    "another device": (
        (X.to("meta"), W.to("meta")),
        {"backend": "triton", "out": torch.empty(2, 12, 4, 3, device="meta")},
        r"Triton runs on CUDA tensors, not on meta",
    ),
    "a tile too large": (
        (X, W),
        {"tile": Tile("pointer", 256, 256, 64, 4, 4)},
        (
            r"tile pointer:256x256x64:4w4s1z .* give "
            r"fewer stages"
        ),
    ),
    "boxes of float32": (
        (X, W),
        {"tile": Tile("tma", 64, 64, 16, 4, 2)},
        r"half precision or tf32",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    args, options, match = ARGUMENTS[name]
    with pytest.raises(KernelError, match=match):
        kernels.conv2d(*args, **options)


@pytest.mark.parametrize(
    ("padding", "match"),
    [
        ("full", "'same', 'valid' or integers"),
        ((1, 2, 3), "one or 2 non"),
        (-1, "non-negative"),
    ],
)
def test_paddings_that_torch_refuses_too(padding: Any, match: str) -> None:
    with pytest.raises(HetConvError, match=match):
        kernels.conv2d(X, W, padding=padding)


@pytest.mark.parametrize("change", ["shape", "dtype", "device"])
def test_a_gradient_that_does_not_fit_is_refused(change: str) -> None:
    g = {
        "shape": zeros(2, 12, 4, 4),
        "dtype": zeros(2, 12, 4, 3).half(),
        "device": zeros(2, 12, 4, 3).to("meta"),
    }
    with pytest.raises(
        KernelError,
        match=r"the gradient is .*, but must be \(2, 12, 4, 3\) in",
    ):
        kernels.conv2d_backward(g[change], X, W, (1, 1), ((0, 0), (0, 0)), (1, 1), 1)


AREA = (3, 3), (1, 1), SAME, (1, 1)
USUAL = KernelQuery(
    "forward", ConvSpec(8, 64, (32, 32), 64, *AREA, 1, "float16"), "ieee", "a GPU"
)
FITTING = Tile("pointer", 64, 128, 32, 4, 2)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (replace(USUAL, unavailable="it is far away"), "it is far away"),
        (
            replace(USUAL, spec=replace(USUAL.spec, dtype="float64")),
            "the kernels compute in float16, bfloat16 and float32, not float64",
        ),
        (
            replace(USUAL, spec=replace(USUAL.spec, kernel=(8, 8))),
            "the kernels take filters of up to 63 taps, not 8 x 8",
        ),
        (
            replace(USUAL, spec=replace(USUAL.spec, C=2**16, K=2**15, kernel=(1, 1))),
            "the kernels address filters of up to 2**30 numbers",
        ),
    ],
)
@pytest.mark.parametrize("entry", [None, FITTING])
def test_what_no_kernel_computes_is_atens(
    query: KernelQuery, reason: str, entry: Tile | None
) -> None:
    if entry is not None:
        tiles.install({("forward", query.spec, query.precision): entry}, query.device)
    assert unsupported_reason(query) == reason
    assert choose(query, "auto") == ATEN


@pytest.mark.parametrize(
    ("entry", "route"),
    [(None, ATEN), ("aten", ATEN), (FITTING, Route("triton", FITTING))],
)
def test_what_was_tuned_decides(entry: Any, route: Route) -> None:
    if entry is not None:
        tiles.install({("forward", USUAL.spec, "ieee"): entry}, USUAL.device)
    assert choose(USUAL, "auto") == route


@pytest.mark.parametrize(
    "other",
    [
        {"device": "another GPU"},
        {"precision": "tf32"},
        {"pass_name": "input gradient"},
        {"spec": replace(USUAL.spec, N=USUAL.spec.N + 1)},
    ],
)
def test_a_tuned_problem_says_nothing_about_others(other: dict[str, Any]) -> None:
    tiles.install({("forward", USUAL.spec, "ieee"): FITTING}, USUAL.device)
    assert choose(replace(USUAL, **other), "auto") == ATEN


def test_what_other_versions_measured_is_ignored() -> None:
    tiles.install(
        {("forward", USUAL.spec, "ieee"): FITTING}, USUAL.device, ("1.0", "1.0")
    )
    assert choose(USUAL, "auto") == ATEN


def test_what_is_asked_for_counts_more_than_the_table() -> None:
    tiles.install({("forward", USUAL.spec, "ieee"): "aten"}, USUAL.device)
    assert choose(USUAL, "triton") == Route("triton")
    assert choose(replace(USUAL, tile=FITTING), "auto") == Route("triton", FITTING)
    tiles.install({("forward", USUAL.spec, "ieee"): FITTING}, USUAL.device)
    assert choose(USUAL, "aten") == ATEN
    assert choose(USUAL, "triton") == Route("triton", FITTING)
    assert choose(replace(USUAL, tile=TILE), "triton") == Route("triton", TILE)


@pytest.mark.parametrize("tile", [None, FITTING])
def test_triton_says_why_it_cannot(tile: Tile | None) -> None:
    question = replace(USUAL, unavailable="it is far away", tile=tile)
    with pytest.raises(
        KernelError,
        match=r"forward of ConvSpec\(.*but it is far away; use backend='auto'",
    ):
        choose(question, "triton" if tile is None else "auto")


@pytest.mark.skipif(ON_GPU, reason="about the CPU")
def test_a_cpu_without_the_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(
        KernelError, match=r"not on cpu .* in its interpreter: TRITON_INTERPRET=1"
    ):
        kernels.conv2d(X, W, backend="triton")
    assert kernels.conv2d(X, W).shape == (2, 12, 4, 3)


def test_set_backend_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        kernels.dispatch.aten,
        "conv",
        lambda *_: called.append("aten") or X.new_zeros(2, 12, 4, 3),
    )
    kernels.conv2d(X, W)
    kernels.set_backend("triton")
    kernels.conv2d(X, W)
    kernels.conv2d(X, W, backend="aten")
    kernels.set_backend("auto")
    kernels.conv2d(X, W)
    assert called == ["aten"] * 3
    with pytest.raises(KernelError, match="backend='fast' is not known"):
        kernels.set_backend("fast")  # type: ignore[arg-type]
