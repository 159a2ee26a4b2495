"""Who computes: Triton or ATen (cuDNN on CUDA). A table read from the top, whose first
row that fits decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hetconv.errors import KernelError
from hetconv.sharding.conv_spec import Conv2dSpec

from .launch import HUGE
from .tiles import Pass, Tile, tuned

Backend = Literal["auto", "triton", "aten"]


@dataclass(frozen=True)
class Question:
    """One pass of a convolution on a device: its GPU's name, or "cpu", and what keeps
    Triton from running there.
    """

    what: Pass
    spec: Conv2dSpec
    precision: str
    device: str
    obstacle: str | None = None
    tile: Tile | None = None

    @property
    def thin(self) -> bool:
        """Groups too narrow to fill a tensor core, depthwise among them."""
        s = self.spec
        return s.groups > 1 and min(s.C, s.K) // s.groups < 16

    @property
    def entry(self) -> Tile | Literal["aten"] | None:
        return tuned(self.device, self.what, self.spec, self.precision)


class Answer(NamedTuple):
    triton: bool
    tile: Tile | None
    why: str


Row = tuple[str, Callable[[Question], bool], Callable[[Question], Answer]]


def _aten(why: str) -> Callable[[Question], Answer]:
    return lambda _: Answer(False, None, why)


def unable(q: Question) -> str | None:
    """Why no kernel computes this, or None."""
    s = q.spec
    if q.obstacle is not None:
        return q.obstacle
    if s.dtype not in ("float16", "bfloat16", "float32"):
        return f"the kernels compute in float16, bfloat16 and float32, not {s.dtype}"
    if s.R * s.S > 63:
        return f"the kernels take filters of up to 63 taps, not {s.R} x {s.S}"
    if s.K * s.C // s.groups * s.R * s.S >= HUGE:
        return "the kernels address filters of up to 2**30 numbers"
    return None


# A GPU on which nothing was tuned computes with cuDNN: nobody has measured yet where
# these kernels beat it.
TABLE: tuple[Row, ...] = (
    (
        "no kernel can",
        lambda q: unable(q) is not None,
        lambda q: Answer(False, None, unable(q) or ""),
    ),
    (
        "ATen was faster",
        lambda q: q.entry == "aten",
        _aten("ATen was faster when this was tuned"),
    ),
    (
        "tuned",
        lambda q: isinstance(q.entry, Tile),
        lambda q: Answer(True, q.entry, "tuned"),  # type: ignore[arg-type]
    ),
    ("thin groups", lambda q: q.thin, _aten("groups are too narrow for tensor cores")),
    ("not tuned", lambda q: True, _aten("this problem was not tuned on this device")),
)


def known(backend: Backend) -> Backend:
    """The same. Raises `KernelError` for a name that is none."""
    if backend not in get_args(Backend):
        raise KernelError(
            f"backend={backend!r} is not known; give 'auto', 'triton' or 'aten'"
        )
    return backend


def choose(question: Question, backend: Backend) -> Answer:
    """Raises `KernelError` where Triton is asked for and cannot."""
    if known(backend) == "aten":
        if question.tile is not None:
            raise KernelError(
                f"tile {question.tile} was given with backend='aten', which has no tiles; "
                "leave out one of them"
            )
        return Answer(False, None, "asked for")
    if backend == "triton" or question.tile is not None:
        why = unable(question)
        if why is not None:
            raise KernelError(
                f"{question.what} of {question.spec} was asked of Triton, but {why}; use "
                "backend='auto'"
            )
        entry = question.entry
        return Answer(
            True,
            question.tile or (entry if isinstance(entry, Tile) else None),
            "asked for",
        )
    return next(answer(question) for _, fits, answer in TABLE if fits(question))
