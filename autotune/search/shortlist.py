"""Which plans are measured beside each other: who may be the fastest, and of whom most is learnt. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hetconv.planner.candidates import EVEN
from hetconv.planner.make_plan import Contender
from hetconv.planner.partition import Splits
from hetconv.schemas.plan import ALONE
from hetconv.sharding.layer_rules import SplitKind

ERROR = 0.25  # by which a prediction may be off: who is predicted to take so much longer may yet be faster
MOST = 6  # plans that are measured, and as many again after what is learnt from them
FIRST = 3  # of them, measured before kinds that are only predicted to come near
FAR, FURTHEST = 2.0, 4.0  # times as long as the best: who is predicted to take that is measured last, or not at all


def even_split(whole_models: Mapping[str, Splits], found: Sequence[Contender]) -> tuple[str, Contender] | None:
    """The one that is predicted to be the fastest of those that fit, by its name: what it equals may have another."""
    even = {name: splits for name, splits in whole_models.items() if name.startswith(EVEN)}
    fitting = [(name, c) for name, splits in even.items() for c in found if c.splits == splits]
    return min(fitting, key=lambda known: known[1].predicted.step_s, default=None)


def near(found: Sequence[Contender], even: Contender | None = None) -> list[Contender]:
    """Who may be the fastest of those that split, as predictions err, and who shows what else whole steps take.

    First the likeliest, and one of each other kind, the ``even`` split among them, that may be the fastest: from these
    more is learnt than from plans that are much the same. Then the rest of the likeliest `FIRST`, kinds that are
    farther off, and others that may be the fastest; last what is too far off for that, for what is left of the budget.
    Nobody, if none comes near a device alone.
    """
    able = (c for c in found if not c.name.startswith(ALONE) and prevalent(c) != "replicate")
    split = sorted(able, key=lambda c: c.predicted.step_s)
    if not split or split[0].predicted.step_s > FAR * min(c.predicted.step_s for c in found):
        return []
    best_s = split[0].predicted.step_s
    likely = [c for c in split[:MOST] if c.predicted.step_s <= (1 + ERROR) * best_s]
    seen = {prevalent(c) for c in likely[:1]}
    telling = [even] if even is not None else []
    for c in split:
        if prevalent(c) not in seen:
            telling.append(c)
            seen.add(prevalent(c))
    telling.sort(key=lambda c: c.predicted.step_s)

    def within(least: float, most: float) -> list[Contender]:
        return [c for c in telling if least * best_s < c.predicted.step_s <= most * best_s]

    may, close, far = within(0.0, 1 + ERROR), within(1 + ERROR, FAR), within(FAR, FURTHEST)
    return [*{c.name: c for c in (*likely[:1], *may, *likely[:FIRST], *close, *likely, *far)}.values()]


def prevalent(contender: Contender) -> SplitKind:
    """The kind of most layers that are split."""
    count: Counter[SplitKind] = Counter(s.kind for s in contender.splits.values() if s.kind != "replicate")
    return max(count, key=lambda kind: (count[kind], kind), default="replicate")
