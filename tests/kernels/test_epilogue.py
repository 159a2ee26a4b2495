"""A convolution that is finished as it is stored: scale, shift, residual and
activation, by Triton and by ATen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetconv import kernels
from hetconv.errors import KernelError
from hetconv.kernels import Tile
from hetconv.kernels.backend_choice import Backend
from hetconv.kernels.epilogue import ACTIVATIONS, activate
from hetconv.sharding.conv_spec import ConvSpec
from tests import reference
from tests.interpreter import (
    BOUNDS,
    DEVICE,
    POINTER,
    SAME,
    TMA,
    Tensors,
    assert_close,
    geometry,
    images,
    skip_unless_it_runs,
    tensors,
)

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
SPEC = images(16, 40, (5, 6), 3, 3, (1, 1), SAME)
TILES = (POINTER, TMA, replace(POINTER, split_k=3), replace(TMA, split_k=3))


def ends(spec: ConvSpec, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    scale, shift = (torch.randn(spec.K, generator=random).to(DEVICE) for _ in range(2))
    residual = torch.randn(spec.y_shape, generator=random).to(
        DEVICE, getattr(torch, spec.dtype)
    )
    return {
        "scale": scale,
        "shift": shift,
        "residual": residual.contiguous(memory_format=torch.channels_last),
    }


def definition(
    spec: ConvSpec, t: Tensors, bias: bool, activation: str | None, **given: Tensor
) -> Tensor:
    x, w, b = (a.double().cpu() for a in (t.x, t.w, t.bias))
    z = reference.conv2d(x, w, b if bias else None, *geometry(spec))
    e = {k: v.double().cpu() for k, v in given.items()}
    z = z * e["scale"].view(-1, 1, 1) if "scale" in e else z
    z = z + e["shift"].view(-1, 1, 1) if "shift" in e else z
    return activate(z + e["residual"] if "residual" in e else z, activation or "", 0.1)


def finished(spec: ConvSpec, t: Tensors, bias: bool, **how: Any) -> Tensor:
    return kernels.conv2d_forward(
        t.x, t.w, t.bias if bias else None, *geometry(spec), slope=0.1, **how
    )


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    "names", [(), ("scale",), ("shift",), ("residual",), ("scale", "shift", "residual")]
)
@pytest.mark.parametrize("bias", [True, False])
def test_each_end_by_each_kernel(
    tile: Tile, names: tuple[str, ...], bias: bool
) -> None:
    skip_unless_it_runs(tile)
    t, given = tensors(SPEC), {n: ends(SPEC)[n] for n in names}
    found = finished(
        SPEC, t, bias, activation="relu", tile=tile, backend="triton", **given
    )
    assert_close(found, definition(SPEC, t, bias, "relu", **given), BOUNDS["float16"])


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_each_activation(dtype: str, activation: str, backend: Backend) -> None:
    spec = replace(SPEC, dtype=dtype)
    t, given = tensors(spec), ends(spec)
    found = finished(spec, t, True, activation=activation, backend=backend, **given)
    assert_close(
        found,
        definition(spec, t, True, activation, **given),
        BOUNDS["tf32" if dtype == "float32" else dtype],
    )


@pytest.mark.parametrize("tile", [POINTER, TMA], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        images(32, 64, (6, 5), 3, 3, (1, 1), SAME, (1, 1), 2),
        images(24, 40, (5, 7), 1, 1),
    ],
    ids=["groups", "1x1"],
)
def test_groups_and_a_row_of_pixels(spec: ConvSpec, tile: Tile) -> None:
    skip_unless_it_runs(tile)
    t, given = tensors(spec), ends(spec)
    found = finished(
        spec, t, True, activation="silu", tile=tile, backend="triton", **given
    )
    assert_close(found, definition(spec, t, True, "silu", **given), BOUNDS["float16"])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_residual_that_lies_as_a_slice_and_a_result_in_a_slot(tile: Tile) -> None:
    skip_unless_it_runs(tile)
    t, given, like = tensors(SPEC), ends(SPEC), SPEC.y_shape
    wide = torch.full(
        (like[0], 64, *like[2:]), torch.nan, dtype=t.x.dtype, device=DEVICE
    )
    wide = wide.contiguous(memory_format=torch.channels_last)
    larger = wide.clone(memory_format=torch.preserve_format)
    given["residual"] = larger[:, 8:48].copy_(given["residual"])
    finished(
        SPEC,
        t,
        True,
        activation="gelu",
        tile=tile,
        backend="triton",
        out=wide[:, 16:56],
        **given,
    )
    assert_close(
        wide[:, 16:56], definition(SPEC, t, True, "gelu", **given), BOUNDS["float16"]
    )
    assert wide[:, :16].isnan().all()
    assert wide[:, 56:].isnan().all()


def test_nan_stays_nan_under_every_activation() -> None:
    t = tensors(SPEC)
    t.x.fill_(torch.nan)
    for activation in ACTIVATIONS:
        assert (
            finished(SPEC, t, True, activation=activation, backend="triton")
            .isnan()
            .all()
        )


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scale": torch.ones(3)}, r"scale is \(3,\).* must be \(40,\)"),
        ({"shift": torch.ones(40, dtype=torch.float16)}, "must be .* torch.float32"),
        (
            {"residual": torch.ones(2, 40, 5, 5)},
            (r"residual is \(2, 40, 5, 5\).* must be \(2, 40, 5, 6\)"),
        ),
        ({"activation": "swish"}, "activation='swish' is not known; give one of relu"),
    ],
)
def test_what_does_not_fit_is_refused(
    wrong: dict[str, Any], said: str, backend: Backend
) -> None:
    wrong = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in wrong.items()}
    with pytest.raises(KernelError, match=said):
        finished(SPEC, tensors(SPEC), True, backend=backend, **wrong)
