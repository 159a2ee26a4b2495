"""The stage of the tuning job that finds the tiles of this rank's convolutions, on GPUs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure import timer
from hetconv.comm.rank_group import Team, objects_of_all
from hetconv.kernels import dispatch
from hetconv.kernels.backend_choice import Question, unable
from hetconv.kernels.tiles import versions_in_use
from hetconv.schemas.tuning_results import TunedTile

from .tile_search import TRIALS, Found, heuristic, search, space
from .tile_trials import Contest


def questions(step: Callable[[], Any]) -> list[Question]:
    """The distinct passes that a step computes here and a kernel can, the most work first."""
    found: Counter[Question] = Counter()

    def count(question: Question) -> None:
        found[question] += 1

    dispatch.listeners.append(count)
    try:
        step()
    finally:
        dispatch.listeners.remove(count)
    able = [q for q in found if unable(q) is None and q.tile is None]  # a chunk comes with its whole's tile
    return sorted(able, key=lambda q: q.spec.flops * found[q], reverse=True)


class Kept(Protocol):
    """What was measured before, and where it is kept from then on: `job.Run`."""

    def known(self, stage: str, key: str, type_: type[Found], /) -> Found | None: ...

    def keep(self, stage: str, key: str, value: Found, /) -> None: ...


def tune_tiles(
    step: Callable[[], Any], device: torch.device, team: Team, enough: Callable[[], bool], say: Reporter, kept: Kept
) -> tuple[TunedTile, ...]:
    """Collective: the tiles of all ranks' passes of a step, those of rank r's i-th at the same time.

    First the default tile of each against ATen, then the studies. A rank on a CPU has none. Stops early once ``enough``
    says so on rank 0. Each pass's study is kept as it ends, and not run again where it is known.
    """
    asked = questions(step)
    own = asked if device.type == "cuda" else []
    counts = objects_of_all(team, len(own))
    found: dict[Question, Found] = {}
    for stage, trials in (("default tiles", 2), ("tiles", TRIALS)):
        say.stage(stage, max(counts))
        for i in range(max(counts)):
            if timer.told(enough()):
                say.line(f"{stage}: {max(counts) - i} smaller passes were left out; --budget would allow more")
                break
            key, better = f"rank {team.rank}: {own[i]}" if i < len(own) else "", None
            if key and (better := kept.known(stage, key, Found)) is None:
                better = studied(own[i], device, trials, found.get(own[i]), enough)
            found |= {own[i]: better} if better is not None else {}
            for of_rank, known in objects_of_all(team, (key, better)):
                if known is not None and kept.known(stage, of_rank, Found) is None:
                    kept.keep(stage, of_rank, known)
            say.advance(_said(own[i], better) if better is not None else "")
    mine = [entry(q, f) for q, f in found.items() if any(t.choice == "aten" for t in f.trials)]
    return merged(objects_of_all(team, mine))


def studied(
    question: Question, device: torch.device, trials: int, so_far: Found | None, enough: Callable[[], bool]
) -> Found | None:
    """The fastest tile of a pass, or ATen; None where nothing ran or memory did not suffice."""
    try:
        contest = Contest(question, device)
    except torch.OutOfMemoryError:
        return so_far
    works, chip = contest.works
    known = so_far.trials if so_far is not None else ()
    return search(
        space(works, chip), heuristic(works, chip), contest, trials=trials - len(known), known=known,
        obstacle=contest.obstacle, enough=enough,
    )  # fmt: skip


def entry(question: Question, found: Found) -> TunedTile:
    q, origin = question, (question.device, *versions_in_use())
    return TunedTile(*origin, q.what, q.spec, q.precision, str(found.choice), found.seconds, found.heuristic_s)  # type: ignore[arg-type]


def merged(every: Sequence[Sequence[TunedTile]]) -> tuple[TunedTile, ...]:
    """One entry for a problem, the fastest, where GPUs of one name have measured the same one."""
    best: dict[Any, TunedTile] = {}
    for t in (t for tiles in every for t in tiles):
        key = (t.device, t.torch, t.triton, t.what, t.spec, t.precision)
        if key not in best or t.seconds < best[key].seconds:
            best[key] = t
    return tuple(best.values())


def _said(question: Question, found: Found) -> str:
    s, default = question.spec, found.heuristic_s
    than = f", {default / found.seconds:.2f}x of the default tile" if default is not None else ""
    shape = f"{s.N}x{s.C}x{s.H}x{s.W} by {s.K} filters {s.R}x{s.S}"
    return f"{question.what} of {shape}: {found.choice}, {found.seconds * 1e6:.0f} us{than}"
