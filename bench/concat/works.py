"""What `bench concat` measures, as data, and who computes it.

Four works, each by Triton and by torch: ``concat``; ``finished``, scaled and shifted as
by a batch norm in eval, then ReLU; and the adjoint of each, of which torch's parts are
packed as a message to another device needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.checks import Error, error
from hetconv import kernels
from hetconv.kernels.concat import launch_split
from hetconv.kernels.epilogue import Epilogue

What = Literal["concat", "finished", "adjoint", "finished adjoint"]
WORKS: tuple[What, ...] = get_args(What)
SIZES = {
    2: (96, 160),
    3: (48, 80, 128),
    4: (40, 56, 72, 88),
    5: (24, 40, 48, 64, 80),
    8: (8, 16, 24, 32, 32, 40, 48, 56),
}
"""Channels of parts, uneven, by their number."""
CHANNELS, SIDE = 256, 32
MEGABYTES = (64, 512, 8, 1)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXACT = Error(0.0, 0.0)  # what is moved alone keeps its bits
LIMITS = {
    "bf16": Error(4e-3, 0.05),
    "fp16": Error(1e-3, 0.01),
    "fp32": Error(1e-6, 1e-5),
}
LARGE = 64  # megabytes from which a pass must reach the copy's bandwidth
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Parts whose result has 256 channels, images of 32 x 32, and that many megabytes
    (2**20 bytes).
    """

    parts: int
    megabytes: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.parts} parts, {self.megabytes} MB, {self.dtype}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES[self.parts]

    @property
    def result_bytes(self) -> int:
        return self.megabytes << 20

    @property
    def samples(self) -> int:
        return self.result_bytes // (
            CHANNELS * SIDE * SIDE * DTYPES[self.dtype].itemsize
        )

    def read_bytes(self, what: What) -> int:
        """The adjoint of an activation reads what it was applied to as well."""
        return self.result_bytes * (2 if what == "finished adjoint" else 1)

    def moved_bytes(self, what: What) -> int:
        return self.read_bytes(what) + self.result_bytes


def cases() -> list[Case]:
    return [Case(p, m, d) for d in DTYPES for m in MEGABYTES for p in SIZES]


def quick() -> list[Case]:
    """The cases that a minute suffices for; what decides most first."""
    found = [Case(p, LARGE, "bf16") for p in SIZES] + [
        Case(3, m, "bf16") for m in MEGABYTES if m != LARGE
    ]
    return [
        *found,
        *(Case(3, LARGE, d) for d in ("fp16", "fp32")),
        *(Case(p, 1, "bf16") for p in (2, 8)),
    ]


class Inputs(NamedTuple):
    """``z`` and ``y``: the parts side by side, and finished, as torch's backward reads
    them. The unread is empty.
    """

    parts: list[Tensor]
    g: Tensor
    z: Tensor
    y: Tensor
    scale: Tensor
    shift: Tensor


def drawn(case: Case, what: What, device: torch.device) -> Inputs:
    """Scale and shift are few-digit numbers, so that no rounding turns the sign of what
    ReLU is given.
    """

    def image(k: int) -> Tensor:
        numbers = torch.randn(
            case.samples, SIDE, SIDE, k, device=device, dtype=DTYPES[case.dtype]
        )
        return numbers.permute(0, 3, 1, 2)

    scale, shift = (
        (torch.randint(1, 8, (CHANNELS,), device=device) / 4).float() for _ in range(2)
    )
    parts = [image(k) for k in case.sizes] if what != "adjoint" else []
    g = image(CHANNELS) if "adjoint" in what else image(0)
    unread = image(0)
    found = Inputs(parts, g, unread, unread, scale, shift)
    if what == "finished adjoint":
        found = found._replace(
            z=torch.cat(parts, 1), y=by_torch("finished", case, found)[0]
        )
    return found


def by_triton(what: What, case: Case, t: Inputs) -> Sequence[Tensor]:
    match what:
        case "concat":
            return [kernels.concat_channels(t.parts, backend="triton")]
        case "finished":
            finish: dict[str, Any] = {
                "scale": t.scale,
                "shift": t.shift,
                "activation": "relu",
            }
            return [kernels.concat_channels(t.parts, **finish, backend="triton")]
        case "adjoint":
            return launch_split(t.g, case.sizes, Epilogue(), ())[1]
        case "finished adjoint":
            epilogue = Epilogue(t.scale, t.shift, activation="relu")
            return launch_split(t.g, case.sizes, epilogue, t.parts)[1]


def by_torch(what: What, case: Case, t: Inputs) -> Sequence[Tensor]:
    mean, variance = torch.zeros_like(t.shift), torch.full_like(t.scale, 1 - EPS)
    match what:
        case "concat":
            return [torch.cat(t.parts, 1)]
        case "finished":
            z = F.batch_norm(
                torch.cat(t.parts, 1), mean, variance, t.scale, t.shift, eps=EPS
            )
            return [F.relu(z, inplace=True)]
        case "adjoint":
            return _packed(t.g, case)
        case "finished adjoint":
            d = torch.ops.aten.threshold_backward(t.g, t.y, 0)
            no_statistics = t.scale.new_empty(0)  # those of a batch, as eval saves them
            dz, _, _ = torch.ops.aten.native_batch_norm_backward(
                d,
                t.z,
                t.scale,
                mean,
                variance,
                no_statistics,
                no_statistics,
                False,
                EPS,
                [True, False, False],
            )
            return _packed(dz, case)


def _packed(g: Tensor, case: Case) -> list[Tensor]:
    return [
        d.contiguous(memory_format=torch.channels_last) for d in g.split(case.sizes, 1)
    ]


def exact(what: What, case: Case, t: Inputs) -> Sequence[Tensor]:
    """The definition, in float64."""
    scale, shift = (v.double().view(-1, 1, 1) for v in (t.scale, t.shift))
    z = torch.cat([p.double() for p in t.parts], 1) if t.parts else t.z
    match what:
        case "concat":
            return [z]
        case "finished":
            return [F.relu(z * scale + shift)]
        case "adjoint":
            d = t.g.double()
        case "finished adjoint":
            d = t.g.double() * (z * scale + shift > 0) * scale
    return torch.split(d, list(case.sizes), 1)


def worst_error(what: What, case: Case, t: Inputs, found: Sequence[Tensor]) -> Error:
    """Of any result on any few samples, as many as float64 has room for."""
    step = max((1 << 25) // (CHANNELS * SIDE * SIDE), 1)
    errors = []
    for i in range(0, case.samples, step):
        few = t._replace(parts=[p[i : i + step] for p in t.parts], g=t.g[i : i + step])
        expected = exact(what, case, few)
        errors += [
            error(a[i : i + step], b) for a, b in zip(found, expected, strict=True)
        ]
    return Error(max(e.norm for e in errors), max(e.worst for e in errors))
