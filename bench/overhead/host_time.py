"""Host time of calls of the kernels, up to the driver's launch, without a GPU.

Launches are recorded in the place of being made, so that what is timed is the Python
that chooses, allocates and packs. What the driver takes for a launch comes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.shared.verdict import Demand
from hetconv import kernels
from hetconv.autotune.measure.paired_rounds import paired
from hetconv.kernels.launch import launching_by
from hetconv.kernels.launchers.recording import RecordingLauncher

CALLS, ROUNDS, CHANNELS = 50, 31, 64
SAME = ((1, 1), (1, 1))
GEOMETRY = ((1, 1), SAME, (1, 1), 1)


class Call(NamedTuple):
    """A call that is timed.

    Attributes:
        run: The call.
        limit_us: Microseconds that it may take, or None where none is set.
    """

    run: Callable[[], Any]
    limit_us: float | None = None


def measure() -> list[dict[str, Any]]:
    """Returns a row for each call: its microseconds, and the limit where there is one."""
    recorder = RecordingLauncher()
    calls = _calls()

    def step(run: Callable[[], Any]) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(CALLS):
                run()
            recorder.clear()

        return repeated

    steps = {name: step(call.run) for name, call in calls.items()}
    with launching_by(recorder):
        times = paired(steps, ROUNDS, torch.device("cpu"))
    return [
        {
            "call": name,
            "us": round(median(times[name]) / CALLS * 1e6, 2),
            "limit_us": call.limit_us,
        }
        for name, call in calls.items()
    ]


def demands(rows: list[dict[str, Any]]) -> list[Demand]:
    """Returns what must hold of the rows of `measure`."""
    return [
        Demand(
            f"{r['limit_us']:g} us over the host time of {r['call']}",
            1.0,
            r["limit_us"] / r["us"],
        )
        for r in rows
        if r["limit_us"] is not None
    ]


def _calls() -> dict[str, Call]:
    x, w, g = (_image(2), _image(CHANNELS, 3), _image(2))
    bias = torch.zeros(CHANNELS, dtype=x.dtype)
    x_leaf, w_leaf, bias_leaf = (t.clone().requires_grad_() for t in (x, w, bias))
    halves = [_image(2, channels=CHANNELS // 2) for _ in range(2)]
    one = torch.ones(1, 1, 1, 1)
    both = (True, True, False)
    kernels_by: dict[str, Any] = {"backend": "triton"}
    return {
        "conv2d_forward": Call(
            lambda: kernels.conv2d_forward(x, w, bias, *GEOMETRY, **kernels_by), 15
        ),
        "conv2d_backward, both gradients": Call(
            lambda: kernels.conv2d_backward(g, x, w, *GEOMETRY, both, **kernels_by), 35
        ),
        "conv2d with autograd, forward": Call(
            lambda: kernels.conv2d(x_leaf, w_leaf, bias_leaf, padding=1, **kernels_by),
            25,
        ),
        "concat_channels of two parts": Call(
            lambda: kernels.concat_channels(halves, **kernels_by)
        ),
        "conv2d_parts of two parts": Call(
            lambda: kernels.conv2d_parts(halves, w, bias, padding=1, **kernels_by)
        ),
        "F.conv2d of one number, computed": Call(lambda: F.conv2d(one, one)),
    }


def _image(count: int, side: int = 8, channels: int = CHANNELS) -> Tensor:
    shape = (count, channels, side, side)
    return torch.zeros(shape, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
