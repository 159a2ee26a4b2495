"""Launches whose arguments are kept, against Triton's own, argument by argument.

A program: it runs without Triton's interpreter, and prints how many launches it compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import knobs

from hetconv import kernels
from hetconv.kernels import Tile, dispatch, launch
from hetconv.kernels.launchers.by_triton import TritonLauncher
from hetconv.kernels.launchers.interface import KernelCall
from tests.kernels.launchers.fake_driver import Arguments, FakeUtils, activate

SAME = ((1, 1), (1, 1))
GEOMETRY = ((1, 1), SAME, (1, 1), 1)
STRIDED = ((2, 2), SAME, (1, 1), 1)
TMA = Tile("tma", 64, 64, 32, 4, 3)
POINTERS = Tile("pointer", 16, 64, 16, 4, 2)
SPLIT = Tile("pointer", 16, 64, 16, 4, 2, 3)
Step = Callable[[], Any]


class ByTritonAlone(TritonLauncher):
    """Makes each launch by Triton."""

    def launch(self, call: KernelCall) -> None:
        super().launch(call)


def image(*shape: int, offset: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Channels-last images whose address is that many elements after an aligned one."""
    N, C, H, W = shape
    numbers = torch.empty(N * C * H * W + offset, dtype=dtype)[offset:]
    return numbers.view(N, H, W, C).permute(0, 3, 1, 2)


def forward(tile: Tile | None, offset: int = 0) -> Step:
    x, w = image(2, 64, 8, 8, offset=offset), image(32, 64, 3, 3)
    y, residual = image(2, 32, 8, 8), image(2, 32, 8, 8)
    bias = torch.empty(32, dtype=torch.float16)
    return lambda: kernels.conv2d_forward(
        x,
        w,
        bias,
        *GEOMETRY,
        residual=residual,
        out=y,
        tile=tile,
        backend="triton",
    )


def input_gradient() -> Step:
    """Of four phases, each of which is a slice of the result."""
    x, w, g = image(2, 16, 8, 8), image(32, 16, 3, 3), image(2, 32, 4, 4)
    wanted, how = (True, False, False), {"tile": POINTERS, "backend": "triton"}
    return lambda: kernels.conv2d_backward(g, x, w, *STRIDED, wanted, **how)


def parts() -> Step:
    """Whose tensors are a tuple."""
    x, w, y = (
        [image(2, 16, 8, 8) for _ in "ab"],
        image(32, 32, 3, 3),
        image(2, 32, 8, 8),
    )
    how = {"padding": 1, "out": y, "backend": "triton", "tile": POINTERS}
    return lambda: kernels.conv2d_parts(x, w, **how)


STEPS: tuple[Callable[[], Step], ...] = (
    lambda: forward(TMA),
    lambda: forward(POINTERS),
    lambda: forward(POINTERS, offset=1),
    lambda: forward(SPLIT),
    input_gradient,
    parts,
)


def launched(utils: FakeUtils, step: Step) -> list[Arguments]:
    """Arguments of the launches of a step; new memory is always at one address."""
    utils.launched.clear()
    with (
        patch.object(Tensor, "new_empty_strided", _at_one_address),
        patch.object(torch, "empty", _workspace),
    ):
        step()
    return list(utils.launched)


_memory: dict[str, Tensor] = {}


def _at_one_address(like: Tensor, shape: Any, strides: Any) -> Tensor:
    numbers = _memory.setdefault("result", torch.zeros(2**16, dtype=torch.float16))
    return numbers.as_strided(shape, strides)


def _workspace(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _memory.setdefault("workspace", torch.zeros(2**18))[:size]


def compare(utils: FakeUtils, make: Callable[[], Step]) -> int:
    """Compares the launches of a step that is like one before; returns their number."""
    first, second = make(), make()
    of_first = launched(utils, first)
    with patch.object(TritonLauncher, "launch", side_effect=AssertionError):
        found = launched(utils, second)
    with launch.launching_by(ByTritonAlone()):
        expected = launched(utils, second)
    assert found == expected, (found, expected)
    assert found != of_first
    return len(found)


def main() -> None:
    utils = activate()
    setattr(dispatch, "unavailable_reason", lambda device: None)  # noqa: B010
    count = sum(compare(utils, make) for make in STEPS)
    knobs.runtime.launch_enter_hook.add(print)  # as a profiler does
    count += compare(utils, STEPS[0])
    assert (print,) in utils.launched[-1]
    print(count)


if __name__ == "__main__":
    main()
