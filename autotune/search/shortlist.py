"""Which plans are worth timing. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from hetconv.planner.candidates import EVEN
from hetconv.planner.make_plan import Contender
from hetconv.planner.partition import Splits
from hetconv.schemas.plan import SINGLE_DEVICE
from hetconv.sharding.split import Split, SplitKind

# By which part a prediction may be off: a plan that is predicted to take so much longer
# may yet be the faster one.
PREDICTION_ERROR = 0.25
MAX_PREDICTED_RATIO = (1 + PREDICTION_ERROR) ** 2
"""Of two predicted times that may be equal, as each may be that far off."""
MAX_LIKELY, FIRST_LIKELY = 6, 3
# Times as long as the fastest: who is predicted to take that is not timed; where no
# split comes nearer to a device alone, none is.
MAX_SLOWDOWN, MAX_SLOWDOWN_OF_ALONE = 4.0, 2.0


def shortlist(
    planned: Sequence[Contender], even: Contender | None = None
) -> list[Contender]:
    """Selects the plans to time, in order, for the budget may not suffice for all.

    First the likeliest to be the fastest, then one of each other kind and the even
    split, for of these a calibration learns more than of plans that are much the same.

    Args:
        planned: what the planner chooses among.
        even: the even split among them, if it is to be timed.

    Returns:
        The plans, none where no split is predicted to come near a device alone.
    """
    able = [
        c
        for c in planned
        if not c.name.startswith(SINGLE_DEVICE)
        and majority_kind(c.splits) != "replicate"
    ]
    split = sorted(able, key=_step_s)
    if not split:
        return []
    best_s, least_s = _step_s(split[0]), min(map(_step_s, planned))
    if best_s > MAX_SLOWDOWN_OF_ALONE * least_s:
        return []
    limit_s = (1 + PREDICTION_ERROR) * best_s
    likely = [c for c in split[:MAX_LIKELY] if _step_s(c) <= limit_s]
    first_of_kind = {majority_kind(c.splits): c for c in reversed(split)}
    telling = [*first_of_kind.values(), *([even] if even is not None else [])]
    telling = [c for c in telling if _step_s(c) <= MAX_SLOWDOWN * best_s]
    order = (*likely[:FIRST_LIKELY], *sorted(telling, key=_step_s), *likely)
    return [*{key_of(c.splits): c for c in order}.values()]


def _step_s(contender: Contender) -> float:
    return contender.predicted.step_s


def majority_kind(splits: Splits) -> SplitKind:
    """Returns the kind of most layers that are split; replicate if none is."""
    count: Counter[SplitKind] = Counter(
        s.kind for s in splits.values() if s.kind != "replicate"
    )
    return max(count, key=lambda kind: (count[kind], kind), default="replicate")


def even_split(
    whole_models: Mapping[str, Splits], planned: Sequence[Contender]
) -> Contender | None:
    """Selects the even split that is predicted to be the fastest.

    Args:
        whole_models: splits of the whole model, by name.
        planned: plans that fit the memory, where one that equals an even split may have
            another name.

    Returns:
        The plan by the name of the even split, or None if no even split fits.
    """
    even = {
        name: splits for name, splits in whole_models.items() if name.startswith(EVEN)
    }
    fitting = [
        c._replace(name=name)
        for name, splits in even.items()
        for c in planned
        if c.splits == splits
    ]
    return min(fitting, key=_step_s, default=None)


def key_of(splits: Mapping[str, Split]) -> str:
    """Returns a digest of a plan, by which its measurements are kept."""
    document = {name: astuple(split) for name, split in splits.items()}
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
