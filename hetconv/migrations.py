"""Plan and profile files of older versions, brought from each version to the next. Pure.

What does not look as its version wrote it stays as it is, for the reader of files to refuse by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .files import Document


def plan_2(document: Document) -> Document:
    """Version 1 had convolutions of images only, with height and width by name."""
    for layer in _members(document.get("layers")):
        op = layer.get("op")
        if isinstance(op, dict) and "spec" in op:
            op["spec"] = _any_rank(op["spec"])
    return document


def plan_3(document: Document) -> Document:
    """Version 2 had splits of one level, which say nothing of nodes."""
    return document


def plan_4(document: Document) -> Document:
    """Version 3 had channel splits whose sums were scattered, and says nothing of whole ones."""
    return document


def profile_2(document: Document) -> Document:
    """The same of the convolutions that were tuned in chunks."""
    for chunks in _members(document.get("chunks")):
        chunks["spec"] = _any_rank(chunks.get("spec"))
    return document


def profile_3(document: Document) -> Document:
    """Version 2 measured linears in float32 and did not say so, and wrote versions into a line of text per rank."""
    prints = document.get("fingerprint")
    prints = prints if isinstance(prints, dict) else {}
    measured = document.get("estimated") is not True
    for rank, device in enumerate(_members(document.get("devices"))):
        operators = device.get("operators")
        if isinstance(operators, dict):
            device["operators"] = {_with_dtype(key): model for key, model in operators.items()}
        if measured:
            device["measured"] = _conditions(prints.get(f"rank {rank}"))
    if measured:
        links = document.get("links")
        for pair, link in links.items() if isinstance(links, dict) else ():
            if isinstance(link, dict):
                link["measured"] = _conditions(prints.get(f"rank {pair.partition('-')[0]}"))
        for tuned in (*_members(document.get("tuned")), *_members(document.get("chunks"))):
            tuned["measured"] = _conditions(prints.get("rank 0"))
    return document


def profile_4(document: Document) -> Document:
    """Version 3 had whole steps at the speed that devices had meanwhile, and the pulses that told it."""
    for plan in _members(document.get("plans")):
        plan.pop("pulse_s", None)
    return document


def profile_5(document: Document) -> Document:
    """The same of the plans that were tuned."""
    return document


def profile_6(document: Document) -> Document:
    """Version 5 had wires where ranks of a host copy messages themselves, and does not know what that takes them."""
    return document


def profile_7(document: Document) -> Document:
    """Version 6 had a factor of all that a device computes in steps beside the corrections of its layers."""
    for device in _members(document.get("devices")):
        slowness, corrections = device.get("slowness"), device.get("corrections")
        if isinstance(slowness, float) and slowness > 0 and isinstance(corrections, dict):
            del device["slowness"]
            for kind, factor in corrections.items():
                corrections[kind] = factor * slowness if isinstance(factor, float) else factor
    return document


PLAN = {1: plan_2, 2: plan_3, 3: plan_4}
PROFILE = {1: profile_2, 2: profile_3, 3: profile_4, 4: profile_5, 5: profile_6, 6: profile_7}


def _members(container: Any) -> Iterator[Document]:
    """The objects in a list or an object."""
    values = container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()
    return (value for value in values if isinstance(value, dict))


def _any_rank(spec: Any) -> Any:
    """{H, W, R, S, ...} -> {size, kernel, ...}."""
    if not isinstance(spec, dict) or not spec.keys() >= {"H", "W", "R", "S"}:
        return spec
    rest = {key: value for key, value in spec.items() if key not in ("H", "W", "R", "S")}
    return {"size": [spec["H"], spec["W"]], "kernel": [spec["R"], spec["S"]]} | rest


def _with_dtype(key: str) -> str:
    return re.sub(r"^(linear \S+ k\d+) by ", r"\1 float32 by ", key)


def _conditions(text: Any) -> Document:
    """Of ``..., torch 2.11.0, triton 3.6.0``; of anything else, that nothing is known."""
    found = re.search(r"torch ([^\s,]+)(?:, triton ([^\s,]+))?$", text) if isinstance(text, str) else None
    return {"at": "", "torch": found[1] if found else "", "triton": (found[2] or "") if found else ""}
