"""Ranks that compute on a GPU: a split model is the unsplit one there too. One GPU
serves all of them.

Runs with HETCONV_TEST_DEVICE=cuda; with HETCONV_TEST_DEVICE=cpu the same tests run on
the CPU, gloo in NCCL's place.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hetconv import kernels
from hetconv.comm.redistribute import redistribute
from hetconv.sharding.layout import Layout
from hetconv.sharding.split import KINDS, SplitKind
from tests.spawn import DEVICE, on_ranks

WHERE = os.environ.get("HETCONV_TEST_DEVICE")
if WHERE not in ("cuda", "cpu"):
    pytest.skip("HETCONV_TEST_DEVICE is not set", allow_module_level=True)
if WHERE == "cpu":
    from tests import interpreter  # noqa: F401  mends bfloat16 in Triton's interpreter

NCCL = "nccl" if WHERE == "cuda" else "gloo"
RATIO = (3, 1)
IMAGE_KINDS = [kind for kind in KINDS if kind != "depth"]
# By the norm. A part adds to a sum that is rounded already, and a ReLU turns where a
# rounding crosses zero.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-3, torch.bfloat16: 5e-2}
needs_models = pytest.mark.skipif(
    importlib.util.find_spec("pydantic") is None, reason="plans need pydantic"
)


class Wide(nn.Module):
    """One convolution twice, so that little is compiled, with channels enough for
    Hopper's copy engine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.conv(x)))


def differences(
    net: str,
    kind: SplitKind,
    dtype: torch.dtype,
    backend: kernels.backend_choice.Backend,
    ratio: tuple[int, ...],
    device: torch.device = DEVICE,
) -> dict[str, float]:
    """Of one step of the split model to the serial one, both by one backend."""
    from tests.equivalence import one_step, pair, relative
    from tests.nets import NETS, OTHER_RANKS, splits_of

    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    # Else both backends multiply float32 in tf32, and a rounding turns a ReLU.
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    make, shape = (NETS | OTHER_RANKS)[net] if net != "wide" else (Wide, (2, 64, 8, 8))
    kernels.set_backend(backend)
    try:
        serial, cut = pair(
            make, splits_of(make(), (kind,), ratio), len(ratio), device, dtype
        )
        x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
        found = one_step(serial, cut, x, by=relative)
    finally:
        kernels.set_backend("auto")
    if dtype != torch.float64:
        del found[
            "loss"
        ]  # a sum of both signs, whose relative error says nothing; the outputs say it
    return found


def assert_alike(found: list[dict[str, float]], dtype: torch.dtype) -> None:
    wrong = [
        {k: v for k, v in one.items() if not v <= TOLERANCES[dtype]} for one in found
    ]
    assert not any(wrong), wrong
    assert all("output 0" in one and "input gradient 0" in one for one in found)


@needs_models
@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("net", ["chain", "resnet", "unet"])
def test_gloo_ranks_on_one_device_by_aten(net: str, kind: SplitKind) -> None:
    dtype = torch.float64
    assert_alike(
        on_ranks(2, differences, net, kind, dtype, "aten", RATIO, method="spawn"), dtype
    )


@needs_models
@pytest.mark.parametrize("kind", KINDS)
def test_gloo_ranks_on_one_device_of_volumes(kind: SplitKind) -> None:
    assert_alike(
        on_ranks(
            2,
            differences,
            "volumes",
            kind,
            torch.float64,
            "auto",
            RATIO,
            method="spawn",
        ),
        torch.float64,
    )


@needs_models
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_gloo_ranks_on_one_device_by_triton(
    kind: SplitKind, dtype: torch.dtype
) -> None:
    assert_alike(
        on_ranks(2, differences, "wide", kind, dtype, "triton", RATIO, method="spawn"),
        dtype,
    )


def on_a_gpu_and_a_cpu(net: str, kind: SplitKind) -> dict[str, float]:
    """The first rank computes on the GPU, the second one on the CPU."""
    device = DEVICE if dist.get_rank() == 0 else torch.device("cpu")
    return differences(net, kind, torch.float64, "aten", RATIO, device)


@needs_models
@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("net", ["chain", "resnet", "unet"])
def test_gloo_ranks_on_a_gpu_and_a_cpu(net: str, kind: SplitKind) -> None:
    assert_alike(
        on_ranks(2, on_a_gpu_and_a_cpu, net, kind, method="spawn"), torch.float64
    )


def messages() -> None:
    """One rank's sums and moves give back what they were given."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    x = torch.arange(48.0, device=DEVICE).view(2, 3, 4, 2)
    y = x.clone()
    dist.all_reduce(y)
    assert torch.equal(x, y)
    shape = tuple(x.shape)
    whole, rows = Layout.replicated(shape, 1), Layout.sharded(shape, 2, (4,))
    for src, dst in (
        (whole, rows),
        (rows, whole),
        (Layout.partial(shape, 1, (3,)), whole),
    ):
        moved = redistribute(x, src, dst)
        assert moved.device == x.device
        assert torch.equal(moved, x)


def test_nccl_messages_of_one_rank() -> None:
    on_ranks(1, messages, method="spawn", backend=NCCL)


@needs_models
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_nccl_model_of_one_rank(kind: SplitKind) -> None:
    dtype = torch.float64
    assert_alike(
        on_ranks(
            1,
            differences,
            "resnet",
            kind,
            dtype,
            "aten",
            (1,),
            method="spawn",
            backend=NCCL,
        ),
        dtype,
    )
