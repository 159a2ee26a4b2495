"""Seconds on a GPU: CUDA events around replays of a captured graph, contenders in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

Run = Callable[[], Any]
# seconds that a graph lasts at least, for a launch takes microseconds and events tick
# in halves of one
GRAPH_S = 1.5e-3
MAX_CALLS = 1024


def cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def seconds(run: Run, repeats: int = 1, event: Callable[[], Any] = cuda_event) -> float:
    """Device seconds of one ``run``; one more goes before, uncounted, during which the
    host gets ahead.
    """
    start, end = event(), event()
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


@dataclass(frozen=True)
class Timed:
    """What is timed: ``run`` makes ``calls`` of them. ``mode`` is "loop" where a graph
    could not be captured.
    """

    run: Run
    calls: int
    mode: Literal["graph", "loop"]

    def once(self) -> float:
        """Seconds of one call."""
        return seconds(self.run) / self.calls


def sets_for(set_bytes: int, cache_bytes: int, most: int = MAX_CALLS) -> int:
    """How many input sets to rotate over so that none is still in the cache: together
    more than twice its size.
    """
    return min(2 * cache_bytes // max(set_bytes, 1) + 1, most)


def calls_for(sets: int, least: float) -> int:
    """Calls in a graph: a multiple of ``sets`` that lasts `GRAPH_S` if a call takes
    ``least`` seconds.
    """
    wanted = min(GRAPH_S / max(least, 1e-6), MAX_CALLS)
    return sets * ceil(wanted / sets)


def prepared(call: Callable[[int], Tensor], sets: int, least: float) -> Timed:
    """``call(i)`` computes on input set i; ``least`` seconds are what it takes at the
    very least.
    """
    calls = calls_for(sets, least)
    for i in range(3):  # compiles, and lets cuDNN choose
        call(i % sets)
    torch.cuda.synchronize()
    try:
        return Timed(_captured(call, calls, sets).replay, calls, "graph")
    except RuntimeError:
        torch.cuda.set_stream(
            torch.cuda.default_stream()
        )  # a capture that fails does not go back to it
        torch.cuda.synchronize()
    return Timed(
        lambda: [call(i % sets) for i in range(min(calls, 100))][-1],
        min(calls, 100),
        "loop",
    )


def _captured(call: Callable[[int], Tensor], calls: int, sets: int) -> Any:
    """A graph of the calls. Results of one rotation live at a time, so that they are
    not one cached buffer.
    """
    graph: Any = torch.cuda.CUDAGraph()
    kept: dict[int, Tensor] = {}
    with torch.cuda.graph(graph):
        for i in range(calls):
            kept[i % sets] = call(i % sets)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def alternated(
    runs: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """What each measured in every round; the order turns round by round, so that drift
    falls on all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name in list(runs)[:: -1 if i % 2 else 1]:
            times[name].append(runs[name]())
    return times


def raced(timed: Mapping[str, Timed], rounds: int) -> dict[str, Any]:
    """Medians over rounds; of another's time over the first's in a round, median, least and most.

    These are of the other that comes nearest; where there are several, of each under
    "against" as well.
    """
    times = alternated({name: t.once for name, t in timed.items()}, rounds)
    ours, *others = times
    against = {name: _over(times[ours], times[name]) for name in others}
    modes = {t.mode for t in timed.values()}
    return {f"{name}_us": median(ts) * 1e6 for name, ts in times.items()} | {
        **against[min(others, key=lambda name: against[name]["ratio"])],
        "mode": "/".join(sorted(modes)),
        **({"against": against} if len(others) > 1 else {}),
    }


def _over(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": median(ratios), "least": min(ratios), "most": max(ratios)}


def tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``measure`` found, or how it failed: a case that does must not take the
    others with it.
    """
    try:
        return measure()
    except torch.OutOfMemoryError as e:
        return {"skipped": short(e)}
    except Exception as e:
        return {"failed": short(e)}


def short(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]


def ceilings(device: torch.device) -> dict[str, float]:
    """Operations and bytes per second of what does little else: a large matrix product,
    a large copy.
    """
    found, n = {}, 8192
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("tf32", torch.float32),
    ):
        a, b, c = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))
        found[name] = (
            2
            * n**3
            / median(
                seconds(lambda a=a, b=b, c=c: torch.mm(a, b, out=c), 10)  # type: ignore[misc]
                for _ in range(5)
            )
        )
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    found["copy"] = moved / median(
        seconds(lambda: target.copy_(source), 10) for _ in range(5)
    )
    return found


def host_seconds(call: Run, calls: int = 200) -> float:
    """Seconds that the host spends on one call whose device work is shorter than that."""
    for _ in range(10):
        call()
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return median(found)
