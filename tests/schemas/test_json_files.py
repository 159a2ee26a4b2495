"""Plan and profile files: an error names what is not valid in them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetconv.errors import HetConvError, PlanError, ProfileError
from hetconv.schemas import json_files
from hetconv.schemas.cluster_profile import VERSION as PROFILE_VERSION
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.plan import VERSION as PLAN_VERSION
from hetconv.schemas.plan import Plan
from hetconv.schemas.provenance import DeviceIdentity, MeasurementConditions
from tests import ROOT

DATA, DOCS = ROOT / "tests" / "data", ROOT / "docs"


class Kind(NamedTuple):
    type: type[ClusterProfile] | type[Plan]
    version: int
    error: type[HetConvError]


KINDS = {
    "profile": Kind(ClusterProfile, PROFILE_VERSION, ProfileError),
    "plan": Kind(Plan, PLAN_VERSION, PlanError),
}


def measured() -> ClusterProfile:
    """All that a profile of this version can say."""
    sample = ClusterProfile.load(DATA / "profile.json")
    identities = (
        DeviceIdentity("a", "NVIDIA A100-SXM4-80GB", "GPU-1"),
        DeviceIdentity("a", "AMD EPYC", "2 threads", 0.5),
    )
    now = MeasurementConditions("2026-11-21T20:00:00Z", "2.13.0", "3.7.1", "580.65")
    devices = tuple(
        replace(d, identity=i, measured=now)
        for d, i in zip(sample.devices, identities, strict=True)
    )
    shared = ClusterProfile.from_devices("T4 / T4", between="ethernet-25g").shared
    return replace(
        sample, devices=devices, shared=shared, fingerprint={"between": "ethernet-25g"}
    )


@cache
def valid(kind: str) -> list[dict[str, Any]]:
    """Documents that load, the one with every key last. Not to be changed: copy them first."""
    new = {"profile": measured, "plan": lambda: Plan.load(DATA / "plan.json")}[kind]()
    head = {"format": f"hetconv-{kind}", "version": KINDS[kind].version}
    current = head | json.loads(
        json.dumps(json_files.adapter(type(new)).dump_python(new, mode="json"))
    )
    return [json.loads((DATA / f"{kind}.json").read_text()), current]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["newer", 0, -1, 1.0, True, "1", None])
def test_other_versions_are_refused_by_name(
    kind: str, version: object, tmp_path: Path
) -> None:
    version = KINDS[kind].version + 1 if version == "newer" else version
    (tmp_path / "x.json").write_text(json.dumps(valid(kind)[0] | {"version": version}))
    todo = "update hetconv" if version == KINDS[kind].version + 1 else "make it anew"
    message = (
        rf"x\.json: version is {version!r}, but this hetconv reads version "
        rf"{KINDS[kind].version}; {todo}"
    )
    with pytest.raises(KINDS[kind].error, match=message):
        KINDS[kind].type.load(tmp_path / "x.json")


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_schema_is_that_of_the_code(kind: str) -> None:
    """Else run: hetconv schema KIND > docs/KIND.schema.json"""
    assert (
        json.loads((DOCS / f"{kind}.schema.json").read_text())
        == KINDS[kind].type.schema()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_knows_the_keys_that_a_file_has(kind: str) -> None:
    schema, document = KINDS[kind].type.schema(), valid(kind)[-1]
    assert schema["properties"].keys() == document.keys()
    assert schema["properties"]["version"] == {"const": KINDS[kind].version}
    assert {"format", "version", "devices"} <= {*schema["required"]}
    parts = (schema, *schema["$defs"].values())
    assert all(
        part["additionalProperties"] is False for part in parts if "properties" in part
    )


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    broken = replace(
        measured(),
        devices=tuple(replace(d, bytes_per_s=float("inf")) for d in measured().devices),
    )
    with pytest.raises(HetConvError, match=r"x\.json.*finite"):
        broken.save(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "where", "value", "named"),
    [
        ("profile", "devices 0 bytes_per_s", 0, r"devices\.0\.bytes_per_s"),
        (
            "profile",
            "devices 0 memory_bytes",
            float("nan"),
            r"devices\.0\.memory_bytes",
        ),
        ("profile", "devices 0 flops_per_s", {}, r"devices\.0\.flops_per_s"),
        (
            "profile",
            "devices 1 flops_per_s float32",
            float("inf"),
            r"devices\.1\.flops_per_s\.float32",
        ),
        ("profile", "devices 1 memory_bytes", "16e9", r"devices\.1\.memory_bytes"),
        ("profile", "devices 1 measured at", "yesterday", r"devices\.1\.measured\.at"),
        ("profile", "links 0-1 latency_s", -1e-6, r"links\.0-1\.latency_s"),
        ("profile", "chunks 0 spec groupz", 1, r"chunks\.0\.spec\.groupz"),
        (
            "plan",
            "layers conv op spec groupz",
            1,
            r"layers\.conv\.op\.Conv\.spec\.groupz",
        ),
        ("plan", "layers conv op spec stride", [0, 1], "layer 'conv': .* no operator"),
        ("plan", "layers conv op spec kernel", [3], "layer 'conv': .* no operator"),
        ("plan", "layers head op x_shape", [], "layer 'head': .* no operator"),
        (
            "plan",
            "layers conv forward_s",
            [1.0],
            "layer 'conv' has 1 numbers for 2 devices",
        ),
        ("plan", "predicted compute_s", [], "predicted has 0 numbers for 2 devices"),
        (
            "plan",
            "predicted sent_bytes 0",
            [0, 1, 2],
            "predicted has 3 numbers for 2 devices",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    kind: str, where: str, value: object, named: str, tmp_path: Path
) -> None:
    *path, last = (int(key) if key.isdigit() else key for key in where.split())
    document = copy.deepcopy(valid(kind)[-1])
    at(document, path)[last] = value
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(KINDS[kind].error, match=rf"x\.json: .*{named}"):
        KINDS[kind].type.load(tmp_path / "x.json")


ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e-320,
    "",
    "1",
]
SCALARS = st.one_of(
    st.sampled_from(ODD), st.text(max_size=5), st.integers(), st.floats()
)
ANYTHING = st.recursive(
    SCALARS,
    lambda x: (
        st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)
    ),
)


def at(document: Any, path: Iterable[Any]) -> Any:
    """What is in a document at a path."""
    for key in path:
        document = document[key]
    return document


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in a document."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def nested(levels: int) -> Any:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A document in which a few places were dropped, doubled, replaced or swapped with others."""
    document = copy.deepcopy(draw(st.sampled_from(valid(kind))))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(document)) or [()]))
        parent = at(document, path[:-1])
        match (
            draw(
                st.sampled_from(
                    ["drop", "replace", "replace", "rename", "number", "nest"]
                )
            )
            if path
            else ""
        ):
            case "drop":
                del parent[path[-1]]
            case "replace":
                parent[path[-1]] = draw(ANYTHING)
            case "rename" if isinstance(parent, dict):
                parent[draw(st.text(max_size=4))] = parent.pop(path[-1])
            case "number" if type(parent[path[-1]]) in (int, float):
                parent[path[-1]] = -parent[path[-1]] + draw(
                    st.sampled_from([0, 1, 0.5])
                )
            case "nest":
                parent[path[-1]] = nested(draw(st.sampled_from([1, 100, 400])))
    return document


def spoilt(text: bytes, at: int, change: str) -> bytes:
    """Bytes of a file that was cut off, or written over, or written in another encoding."""
    at %= len(text)
    match change:
        case "cut":
            return text[:at]
        case "flip":
            return text[:at] + bytes([text[at] ^ 0x80]) + text[at + 1 :]
        case "utf-16":
            return text.decode().encode("utf-16")
        case "bom":
            return b"\xef\xbb\xbf" + text
        case "deep":
            return text[:at] + b"[" * 100_000
        case "twice":
            return text[:at] + text
    return text


def check(kind: str, path: Path, content: bytes) -> None:
    """The law: it is refused by an error that names the file, or it is what comes back
    when it is saved.
    """
    path.write_bytes(content)
    try:
        value = KINDS[kind].type.load(path)
    except KINDS[kind].error as e:
        message = str(e)
        assert message.startswith(f"{path}: ")
    else:
        value.save(path)
        assert KINDS[kind].type.load(path) == value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [None, [0], {"0": {}}, "0"], ids=str)
def test_no_part_can_be_something_else_in_a_file(
    kind: str, odd: object, tmp_path: Path
) -> None:
    for document in valid(kind):
        for path in places(document):
            if isinstance(at(document, path), dict | list | str):
                parent, last = at(document, path[:-1]), path[-1]
                was, parent[last] = parent[last], odd
                content = json.dumps(document).encode()
                parent[last] = was
                check(kind, tmp_path / "x.json", content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_document_is_refused_by_name_or_comes_back_as_it_is(
    kind: str, tmp_path: Path
) -> None:
    @settings(max_examples=100)
    @given(mutated(kind))
    def law(document: dict[str, Any]) -> None:
        check(kind, tmp_path / "x.json", json.dumps(document).encode())

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_spoilt_bytes_are_refused_by_name_or_come_back_as_they_are(
    kind: str, tmp_path: Path
) -> None:
    texts = [json.dumps(document).encode() for document in valid(kind)]

    @settings(max_examples=200)
    @given(
        st.sampled_from(texts),
        st.integers(0, 10**6),
        st.sampled_from(["cut", "flip", "utf-16", "bom", "deep", "twice"]),
    )
    def law(text: bytes, at: int, change: str) -> None:
        check(kind, tmp_path / "x.json", spoilt(text, at, change))

    law()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format": "hetconv-plan"}',
        b"NaN",
        b"1" * 5000,
    ],
)
def test_what_is_no_such_file_at_all_is_refused(content: bytes, tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(KINDS[kind].error, match=r"x\.json"):
            KINDS[kind].type.load(tmp_path / "x.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        ClusterProfile.load(tmp_path)  # a folder
