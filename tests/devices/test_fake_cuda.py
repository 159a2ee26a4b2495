"""What hetconv asks of PyTorch on CUDA alone, or otherwise than on a CPU, on fake CUDA
tensors: no GPU is needed.

These know which device an operator takes and gives tensors on, and shapes, dtypes and
memory formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hetconv import kernels
from hetconv.kernels import aten, norms
from hetconv.kernels.launch import LaunchSequence
from hetconv.kernels.norms import passes
from hetconv.ops.norms import group_norm
from hetconv.ops.norms.statistics import exact_of
from hetconv.sharding.conv_spec import ConvGeometry
from tests import ROOT

SHAPE = (4, 6, 8, 7)
GEOMETRY = ConvGeometry((2, 2), ((1, 1), (1, 1)), (1, 1), 2)
BRANCHES = {
    "kernels/norms/aten.py": "all passes of norms, where Triton computes none",
    "hetconv/ops/norms/calls.py": "_cast",
    "hetconv/ops/norms/normalized_region.py": "_filled: where slices are not dense",
    "hetconv/ops/as_called.py": "_seeded",
    "hetconv/comm/exchange.py": "Round: a device is waited for while messages are taken in turn",
    "hetconv/comm/collectives.py": "_start_collective: likewise",
    "hetconv/comm/redistribute.py": "_started: which pieces are packed",
    "hetconv/ops/pooling.py": "_differentiable",
    "hetconv/runtime/throttle.py": "the clock and the pauses of slowed devices",
    "hetconv/nn/parallelize.py": "_share_random_state",
    "hetconv/rebalancing/shard_moves.py": "_description: numbers of optimizers, in host memory",
    "hetconv/rebalancing/speed_probe.py": "a probe on a GPU is waited for",
    "hetconv/runtime/local_rank.py": "the current device, and whether there is NCCL",
    "hetconv/runtime/rank_devices.py": "device_identity",
    "hetconv/runtime/step_monitor.py": "event_marks",
    "kernels/chip.py": "the chip",
    "kernels/launch.py": "the current device",
    "kernels/dispatch.py": "whether Triton moves numbers",
    "kernels/backend_choice.py": "whether Triton runs, and the device's name",
}
"""Where the code asks whether a tensor is on CUDA, and what depends on it."""

Call = Callable[[str, torch.dtype], list[Tensor | None]]


def images(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.empty(shape or SHAPE, device=device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def of_channels(device: str, dtype: torch.dtype) -> Tensor:
    exact = dtype if dtype == torch.float64 else torch.float32
    return torch.empty(SHAPE[1], device=device, dtype=exact)


def batch_norm_of_given_moments(device: str, dtype: torch.dtype) -> list[Tensor | None]:
    c = of_channels(device, dtype)
    return [F.batch_norm(images(device, dtype), c, c, c, c, False, 0.0, 1e-5)]


def moments_of_groups(device: str, dtype: torch.dtype) -> list[Tensor | None]:
    x = images(device, dtype)
    op = group_norm.GroupNorm(SHAPE, 3)
    return [group_norm.moments_of_groups(x, op, 0, exact_of(x))]


def convolution(device: str, dtype: torch.dtype) -> list[Tensor | None]:
    return [
        aten.conv(
            images(device, dtype), images(device, dtype, 8, 3, 3, 3), None, GEOMETRY
        )
    ]


def convolution_backward(device: str, dtype: torch.dtype) -> list[Tensor | None]:
    g, w = images(device, dtype, 4, 8, 4, 4), images(device, dtype, 8, 3, 3, 3)
    return list(
        aten.backward(g, images(device, dtype), w, GEOMETRY, (True, True, True))
    )


def strided_filters_of_one_tap(device: str, dtype: torch.dtype) -> list[Tensor | None]:
    """Which on a CPU are computed in a way of our own."""
    g, w, sides = (
        images(device, dtype, 4, 8, 4, 4),
        images(device, dtype, 8, 6, 1, 1),
        ((0, 0), (0, 0)),
    )
    return list(
        aten.backward(
            g,
            images(device, dtype),
            w,
            ConvGeometry((2, 2), sides, (1, 1), 1),
            (True, True, True),
        )
    )


CALLS: tuple[Call, ...] = (
    batch_norm_of_given_moments,
    moments_of_groups,
    convolution,
    convolution_backward,
    strided_filters_of_one_tap,
)
WITHOUT_FAKES = {
    "batch_norm_update_stats": "input running_mean running_var momentum",
    "batch_norm_backward_reduce": "grad_out input mean invstd weight input_g weight_g bias_g",
}
"""Operators that fake tensors do not know, and the arguments that they are given, in order."""


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch was built without CUDA")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_cuda_gives_what_a_cpu_gives(call: Call, dtype: torch.dtype) -> None:
    """By ATen on both."""
    kernels.set_backend("aten")
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=False):
        for device in ("cpu", "cuda"):
            results = call(device, dtype)
            assert all(y is None or y.device.type == device for y in results)
            found[device] = [None if y is None else (y.shape, y.dtype) for y in results]
    assert found["cuda"] == found["cpu"]


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch was built without CUDA")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_passes_of_norms_are_launched_on_cuda(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors on the device alone; here the launches themselves do nothing."""
    launched = []

    def run(self: LaunchSequence, **tensors: Tensor) -> None:
        assert all(t.is_cuda for t in tensors.values())
        launched.append(self)

    monkeypatch.setattr(LaunchSequence, "run", run)
    monkeypatch.setattr(passes, "unavailable_reason", lambda device: None)
    N, C = SHAPE[:2]
    with FakeTensorMode(allow_non_fake_inputs=False):
        x, c = images("cuda", dtype), of_channels("cuda", dtype)
        per_sample = c.expand(N, C)
        results = [
            norms.normalized(x, per_sample, per_sample, c, c, 1e-5),
            norms.combination(x, x, per_sample, per_sample, per_sample),
        ]
        numbers = [
            norms.moments(x, torch.float32, C),
            norms.sums(x, x, per_sample, per_sample),
            norms.moments_of_channels(x, torch.float32)[:, None].expand(2, N, C),
            norms.sums_of_channels(x, x, c, c)[:, None].expand(2, N, C),
        ]
    assert len(launched) == len(results) + len(numbers)
    for y in results:
        assert (y.shape, y.dtype, y.is_cuda) == (SHAPE, dtype, True)
        assert y.is_contiguous(memory_format=torch.channels_last)
    for t in numbers:
        assert (t.shape, t.dtype, t.is_cuda) == ((2, N, C), torch.float32, True)


@pytest.mark.parametrize("name", WITHOUT_FAKES)
def test_what_fake_tensors_do_not_know_takes_the_arguments_that_it_is_given(
    name: str,
) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert " ".join(a.name for a in schema.arguments) == WITHOUT_FAKES[name]


def test_every_branch_for_cuda_is_listed() -> None:
    asks = re.compile(
        r"\bis_(cuda|cpu)\b(?!\"| is_sparse)|"
        r"device\.type [!=]= \"(cuda|cpu)\"|is_autocast_enabled\(\"cuda\"\)"
    )
    files = [*(ROOT / "hetconv").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if "hetconv/autotune/" not in str(path) and asks.search(path.read_text("utf-8"))
    }
    only_for_cpus = {
        "hetconv/ops/trial_run.py",
        "hetconv/comm/rank_group.py",
        "kernels/aten.py",
        "kernels/memory_formats.py",
    }
    assert found - only_for_cpus == set(BRANCHES)
