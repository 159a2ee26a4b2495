"""Lets torchvision be imported beside a torch that its compiled operators were not built for.

torchvision's Python modules register functions for these operators when they are
imported. No model of the tests calls one, so that to declare them is enough.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, requires

import torch
from packaging.requirements import Requirement

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _is_built_for_this_torch() -> bool:
    try:
        needed = map(Requirement, requires("torchvision") or ())
    except PackageNotFoundError:
        return True
    return all(
        r.specifier.contains(torch.__version__.split("+")[0])
        for r in needed
        if r.name == "torch"
    )


@cache  # which also keeps the library: it takes its operators with it when it is deleted
def declare_operators() -> torch.library.Library | None:
    """Declares them if torch needs it. Call this before torchvision, or transformers,
    which imports it, is imported.
    """
    if _is_built_for_this_torch():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library
