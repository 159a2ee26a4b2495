"""Lets torchvision be imported beside a torch that its compiled operators were not built for.

torchvision's Python modules register functions for these operators when they are imported. No model of the tests calls
one, so that to declare them is enough. Import this module before torchvision, or before transformers, which imports it.
"""

from __future__ import annotations

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
    return all(r.specifier.contains(torch.__version__.split("+")[0]) for r in needed if r.name == "torch")


if not _is_built_for_this_torch():
    DECLARED = torch.library.Library("torchvision", "DEF")  # kept for as long as the process lives
    for schema in SCHEMAS:
        DECLARED.define(schema)
