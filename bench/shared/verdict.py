"""What measured cases come to: geometric means, the worst, and whether what must hold
does. Plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from hetconv.kernels.tiles import Pass

Row = Mapping[str, Any]  # one pass of one case, see `kernels.measured`
HALF = ("bf16", "fp16")


def geomean(values: Iterable[float]) -> float | None:
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs)) if logs else None


def timed(rows: Iterable[Row]) -> list[Row]:
    return [r for r in rows if "ratio" in r]


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The geometric mean of cuDNN's time over Triton's, by pass, share of the filters and dtype."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for r in timed(rows):
        groups.setdefault((r["pass"], r["part"], r["dtype"]), []).append(r["ratio"])
    return [
        {
            "pass": what,
            "part": part,
            "dtype": dtype,
            "cases": len(ratios),
            "geomean": geomean(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        for (what, part, dtype), ratios in groups.items()
    ]


def worst(rows: Iterable[Row], count: int = 8) -> list[Row]:
    return sorted(timed(rows), key=lambda r: float(r["ratio"]))[:count]


@dataclass(frozen=True)
class Demand:
    """A number that must not be below a limit. It is None where nothing was measured
    that it is about.
    """

    text: str
    limit: float
    value: float | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value >= self.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"not measured  {self.text} >= {self.limit:g}"
        return (
            f"{'met' if self.met else 'MISSED':12}  {self.text} >= {self.limit:g}: "
            f"{self.value:.3f}"
        )


def demands(rows: Sequence[Row], ceilings: Mapping[str, float]) -> list[Demand]:
    """What must hold. Ratios are of half precision; ceilings are per second, ``copy``
    in bytes, others operations.
    """

    def ratios(
        what: Pass, wanted: Callable[[Row], bool] = lambda r: True
    ) -> list[float]:
        return [
            r["ratio"]
            for r in timed(rows)
            if r["pass"] == what and r["dtype"] in HALF and wanted(r)
        ]

    def reached(layer: str, figure: str, ceiling: str) -> float | None:
        name = f"{layer} N32 bf16 K"
        found = [
            r[figure]
            for r in timed(rows)
            if r["name"] == name and r["pass"] == "forward"
        ]
        return found[0] / ceilings[ceiling] if found else None

    forward = ratios("forward")
    return [
        Demand(
            "forward, whole layers, geometric mean",
            1.0,
            geomean(ratios("forward", lambda r: r["part"] == "K")),
        ),
        Demand(
            "forward, slices, geometric mean",
            1.1,
            geomean(ratios("forward", lambda r: r["part"] != "K")),
        ),
        Demand("forward, every case", 0.8, min(forward) if forward else None),
        Demand(
            "input gradient, geometric mean", 0.9, geomean(ratios("input gradient"))
        ),
        Demand(
            "weight gradient, geometric mean", 0.9, geomean(ratios("weight gradient"))
        ),
        Demand(
            "3x3 256-256 @56 N32 bf16, of the matrix product's rate",
            0.7,
            reached("vgg16 256-256 3x3 @56", "flops_per_s", "bf16"),
        ),
        Demand(
            "1x1 64-256 @56 N32 bf16, of the copy's bandwidth",
            0.8,
            reached("resnet50 64-256 1x1 @56", "bytes_per_s", "copy"),
        ),
    ]
