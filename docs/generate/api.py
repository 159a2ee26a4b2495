"""The reference of public names, from their docstrings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hetconv

GROUPS = {
    "models": "parallelize capture call_with_whole_weights clip_grad_norm_ GradScaler "
    "sync_replicated same_batches",
    "layers": "HetConv1d HetConv2d HetConv3d Split",
    "checkpoints": "save_checkpoint load_checkpoint full_state_dict load_full_state_dict "
    "full_optim_state_dict load_full_optim_state_dict",
    "plans": "make_plan Plan ClusterProfile Graph profile_of_ranks",
    "workers": "Workers",
    "rebalancing": "Rebalancer monitor Monitor StepReport apply_plan",
    "data movement": "HetTensor gather redistribute Layout ReadRegion Box apportion count_sent",
    "kernels": "kernels",
    "errors": "HetConvError SplitError LayoutError PlanError ProfileError OutputError "
    "DisagreementError LostRankError KernelError",
}


def check() -> None:
    """Refuses public names that no page has, and names that are not public.

    Raises:
        SystemExit: naming them.
    """
    shown = " ".join(GROUPS.values()).split()
    lacking, unknown = (
        set(hetconv.__all__) - set(shown),
        set(shown) - set(hetconv.__all__),
    )
    if lacking or unknown or len(shown) != len(set(shown)):
        raise SystemExit(
            f"docs/generate/api.py: put each name of hetconv.__all__ into one group; missing "
            f"{sorted(lacking)}, unknown {sorted(unknown)}"
        )


def section(group: str) -> Callable[[], str]:
    """Returns what makes the text of a group."""
    return lambda: "\n\n".join(map(_directive, GROUPS[group].split()))


def _directive(name: str) -> str:
    if name != "kernels":
        return _shown(name, getattr(hetconv, name))
    public = {n: getattr(hetconv.kernels, n) for n in hetconv.kernels.__all__}
    return "\n\n".join(
        _shown(f"kernels.{n}", value) for n, value in public.items() if callable(value)
    )


def _shown(name: str, value: Any) -> str:
    options = f"    options:\n      heading: hetconv.{name}\n      toc_label: {name}"
    return f"::: {value.__module__}.{value.__qualname__}\n{options}"
