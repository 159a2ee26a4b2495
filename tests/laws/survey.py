"""Runs many cases on ranks that are kept, and ends ranks that hang or go apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.spawn import Pool

LIMIT = timedelta(seconds=20)
"""For which a rank waits for another one. A case takes milliseconds."""
AT_ONCE = 100
"""Cases of one job."""


class Result(NamedTuple):
    """Of one case on one rank. ``outcome``: right, wrong, or raised (where plain torch
    does not).
    """

    case: int
    outcome: str
    said: str


def in_step(
    start: int, cases: Iterable[Callable[[], tuple[str, str]]]
) -> tuple[list[Result], bool]:
    """Runs cases, numbered from ``start``, until the ranks have gone apart.

    Args:
        start: the number of the first case.
        cases: each gives its outcome on this rank and what is to be said of it.

    Returns:
        The results on this rank, and whether the ranks went apart at the last of them.
    """
    found = list[Result]()
    for number, case in enumerate(cases, start):
        outcome, said = case()
        found.append(Result(number, outcome, said))
        codes = [
            torch.zeros((), dtype=torch.int64, device="cpu")
            for _ in range(dist.get_world_size())
        ]
        try:
            dist.all_gather(
                codes,
                torch.tensor(
                    ["right", "wrong", "raised"].index(outcome) * 1000 + number,
                    device="cpu",
                ),
            )
        except RuntimeError:
            return found, True
        if len(set(map(int, codes))) > 1:
            return found, True
    return found, False


class Fault(NamedTuple):
    subject: str
    case: int
    outcome: str
    said: list[str]


@dataclass
class Survey:
    right: int = 0
    faults: list[Fault] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(f.outcome == outcome for f in self.faults)

    def __str__(self) -> str:
        counts = ", ".join(
            f"{self.count(o)} {o}" for o in ("wrong", "raised", "hung", "apart")
        )
        return f"{self.right} right, {counts}"


class Subject(NamedTuple):
    """``name``, how many cases it has, and ``args`` of the function that runs them on a rank."""

    name: str
    cases: int
    args: tuple[Any, ...]


def survey(
    world: int, run: Callable[..., Any], subjects: Iterator[Subject] | Sequence[Subject]
) -> Iterator[tuple[Subject, Survey]]:
    """Runs all cases of all subjects, one subject after the other.

    Args: world: the number of ranks. run: called on every rank as ``run(*subject.args,
        start, stop)``; returns the results of the cases from
            ``start`` up to ``stop``, or of fewer if the ranks went apart, and whether they did.
        subjects: what to run.
    """
    pool = Pool(world, timeout=LIMIT)
    try:
        for subject in subjects:
            found, start = Survey(), 0
            while start < subject.cases:
                stop = min(start + AT_ONCE, subject.cases)
                answers = pool.outcomes(run, *subject.args, start, stop)
                start, apart = _told(found, subject.name, answers, start, stop)
                if apart:
                    pool.close()
                    pool = Pool(world, timeout=LIMIT)
            yield subject, found
    finally:
        pool.close()


def _told(
    found: Survey, name: str, answers: list[tuple[bool, Any]], start: int, stop: int
) -> tuple[int, bool]:
    """Counts what the ranks answered. Returns the next case, and whether the ranks are lost."""
    lost = [f"rank {r}: {value}" for r, (ok, value) in enumerate(answers) if not ok]
    results: list[list[Result]] = [value[0] if ok else [] for ok, value in answers]
    done = min(map(len, results))
    for each in zip(*(r[:done] for r in results), strict=True):
        outcomes = {r.outcome for r in each}
        if outcomes == {"right"}:
            found.right += 1
            continue
        outcome = "apart" if len(outcomes) > 1 else each[0].outcome
        if any("nothing came within" in r.said or "imed out" in r.said for r in each):
            outcome = "hung"
        found.faults.append(Fault(name, each[0].case, outcome, [r.said for r in each]))
    apart = any(ok and value[1] for ok, value in answers)
    if lost:
        found.faults.append(Fault(name, start + done, "hung", lost))
        return start + done + 1, True
    return start + done if done else stop, apart
