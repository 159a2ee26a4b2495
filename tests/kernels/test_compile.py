"""The committed tables of `bench compile`: they are of these kernels, cover every tile,
and show what tiles promise.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

import bench.__main__
from bench.compile import cases
from bench.compile import suite as bench_compile
from bench.compile.cases import DTYPES, Item
from bench.concat.launches import concat_items
from bench.norms.launches import norm_items
from hetconv.kernels import Tile, tiles
from hetconv.kernels.chip import CHIPS
from hetconv.kernels.triton.compile_report import left_in_registers
from hetconv.sharding.conv_spec import ConvSpec
from tests import ROOT

VERSIONS = [
    p.stem.removeprefix("triton-")
    for p in sorted((ROOT / "bench/results/compile").glob("*.json"))
]
ITEMS = bench_compile.all_items()
CONVOLUTIONS = [item for item in ITEMS if isinstance(item, Item)]


def sides_of(tile: Tile) -> tuple[object, ...]:
    """All of a tile but stages and splits: each is compiled with the most stages that fit."""
    return tile.kind, tile.m, tile.n, tile.k, tile.warps


COMPILED = {
    (i.arch, i.what, i.dtype, i.case, sides_of(Tile.parse(i.tile)))
    for i in CONVOLUTIONS
}


def table(version: str) -> Any:
    return json.loads(
        (ROOT / f"bench/results/compile/triton-{version}.json").read_text("utf-8")
    )


def entries(version: str) -> Iterator[tuple[Item, dict[str, int]]]:
    """Those of convolutions."""
    found = table(version)
    for item in CONVOLUTIONS:
        yield (
            item,
            dict(zip(found["columns"], found["entries"][str(item)], strict=True)),
        )


def test_there_is_a_table_of_the_version_that_make_installs() -> None:
    assert (
        re.search(
            r"^triton==(.*)$", (ROOT / "constraints/torch-2.13.txt").read_text(), re.M
        )[1]
        in VERSIONS
    )  # type: ignore[index]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_is_of_these_kernels_and_tiles(version: str) -> None:
    """Else run: python -m bench compile -o bench/results/compile/triton-VERSION.json"""
    found = table(version)
    assert found["setup"]["triton"] == version
    assert list(found["entries"]) == [str(i) for i in ITEMS]
    assert found["setup"]["digest"] == bench_compile.digest(ITEMS)


@given(
    sizes=st.tuples(*[st.integers(1, n) for n in (64, 512, 64, 64, 512)]),
    kernel=st.sampled_from([1, 3, 7]),
    stride=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 1, 2]),
    unit=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from(list(DTYPES)),
    arch=st.sampled_from(list(CHIPS)),
)
def test_every_tile_that_is_chosen_was_compiled(
    sizes: Any, kernel: int, stride: int, groups: int, unit: int, dtype: str, arch: int
) -> None:
    """In its sides and warps, with the most stages that fit."""
    N, C, H, W, K = sizes
    C, K = groups * unit * -(-C // unit), groups * unit * -(-K // unit)
    sides = (kernel // 2, kernel // 2)
    strides, padding, one = (stride, stride), (sides, sides), (1, 1)
    spec = ConvSpec(N, C, (H, W), K, (kernel, kernel), strides, padding, one, groups)
    for what in cases.PASSES:
        product = cases.product_of(cases.Case(spec), what, dtype)
        tile = tiles.default_tile(product.shape, CHIPS[arch])
        assert (arch, what, dtype, "3x3", sides_of(tile)) in COMPILED


@pytest.mark.parametrize("version", VERSIONS)
def test_no_launch_spills(version: str) -> None:
    """But for a few instructions of eight tiles by pointers in 3.6."""
    for item, e in entries(version):
        assert e["spills"] <= (
            16 if version == "3.6.0" and item.tile.startswith("pointer") else 0
        ), str(item)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_pass_of_a_norm_spills_and_its_results_are_stored_16_bytes_at_a_time(
    version: str,
) -> None:
    """Where numbers lie side by side, from an aligned address on."""
    found = table(version)
    for item in norm_items(tuple(CHIPS)):
        entry = dict(zip(found["columns"], found["entries"][str(item)], strict=True))
        assert entry["spills"] == 0, str(item)
        is_image = item.what in ("normalization", "combination")
        if is_image and item.case != "columns of contiguous":
            assert entry["stores_128"] > 0, str(item)
            assert entry["stores_narrow"] == 0, str(item)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_concatenation_spills_and_its_units_are_moved_16_bytes_at_a_time(
    version: str,
) -> None:
    """In both forms, with and without an epilogue, and split again."""
    found = table(version)
    for item in concat_items(tuple(CHIPS)):
        entry = dict(zip(found["columns"], found["entries"][str(item)], strict=True))
        assert entry["spills"] == 0, str(item)
        if item.case != "odd parts":
            assert entry["loads_128"] > 0, str(item)
            assert entry["stores_128"] > 0, str(item)
            assert entry["loads_narrow"] == entry["stores_narrow"] == 0, str(item)


@pytest.mark.parametrize("version", VERSIONS)
def test_operands_fit_in_shared_memory(version: str) -> None:
    for item, e in entries(version):
        assert e["shared"] <= CHIPS[item.arch].shared, str(item)


@pytest.mark.parametrize("version", VERSIONS)
def test_products_run_on_tensor_cores(version: str) -> None:
    """But float32 as IEEE wants it, which they do not know."""
    for item, e in entries(version):
        if not item.of_sum:
            assert (e["wgmma"] + e["mma"] > 0) == (item.dtype != "fp32"), str(item)


@pytest.mark.parametrize("version", VERSIONS)
def test_boxes_take_the_hopper_instructions_and_store_16_bytes_at_a_time(
    version: str,
) -> None:
    found = [(i, e) for i, e in entries(version) if "tma" in i.tile and not i.of_sum]
    assert {i.arch for i, _ in found} == {90}
    for item, e in found:
        assert e["copies"] > 0, str(item)
        assert e["stores_128"] > 0, str(item)
        assert e["stores_narrow"] == 0, str(item)
        assert e["wgmma"] > 0, str(item)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_left_operand_comes_from_registers(version: str) -> None:
    """Results would differ from call to call."""
    assert all(e["left"] == 0 for _, e in entries(version))


PTX = (
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f1, %f2}}, {left}, %rd2, %p1, "
    "1, 1, 0, 1;"
)


def test_left_operands_are_told_apart() -> None:
    found = [
        left_in_registers(PTX.format(left=left) * 2) for left in ("%rd1", "{%r1, %r2}")
    ]
    assert found == [0, 2]


@pytest.mark.parametrize("version", VERSIONS)
def test_slices_of_16_filters_store_16_bytes_at_a_time(version: str) -> None:
    found = [
        e
        for i, e in entries(version)
        if i.case in ("3x3 of 48 filters", "3x3 of 160 filters")
    ]
    assert found
    assert all(e["stores_128"] > 0 and e["stores_narrow"] == 0 for e in found)


LIVE = """
import json, sys
from dataclasses import astuple
from bench.compile.suite import all_items, compile_one
chosen = {str(i): i for i in all_items(quick=True)}
found = {name: compile_one(chosen[name]) for name in json.loads(sys.argv[1])}
print(json.dumps({name: list(astuple(report)) for name, report in found.items()}))
"""


@pytest.mark.skipif(
    triton.__version__ not in VERSIONS,
    reason=f"no table was made with triton {triton.__version__}",
)
def test_the_compiler_here_makes_the_same_of_a_sample(tmp_path: Path) -> None:
    found = table(triton.__version__)["entries"]
    sample = [
        str(i)
        for i in sorted(cases.items(quick=True))
        if i.case == "3x3 of 48 filters" and (i.arch == 90 or i.what == "forward")
    ]
    sample += [
        str(i)
        for i in norm_items((90,), quick=True)
        if i.case == "contiguous" and i.what in ("moments", "combination")
    ]
    sample += [
        str(i)
        for i in concat_items((90,), quick=True)
        if i.epilogue == "scaled, relu" and i.case in ("wide parts", "narrow parts")
    ]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-c", LIVE, json.dumps(sample)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: found[name] for name in sample}


def test_each_command_is_helped_by_its_first_line() -> None:
    for name, line in bench.__main__.COMMANDS.items():
        doc = ast.get_docstring(
            ast.parse(
                (
                    ROOT / f"{bench.__main__.module_of(name).replace('.', '/')}.py"
                ).read_text("utf-8")
            )
        )
        assert doc is not None
        assert doc.splitlines()[0] == line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "usage"),
        ("nothing", "invalid choice"),
        ("compile --archs 70", "bench: --archs 70"),
        ("compile --workers 0", "at least 1"),
        ("pair --devices toaster", "bench: device 'toaster'"),
        ("pair --size 7", "at least 8"),
    ],
)
def test_what_does_not_fit_exits_with_status_2(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        bench.__main__.main(arguments.split())
    assert e.value.code == 2
    assert said in capsys.readouterr().err


def test_a_command_imports_its_own_module_alone() -> None:
    absent = (
        "import sys\nfor name in 'optuna pydantic rich typer'.split(): sys.modules[name] "
        "= None\n"
    )
    code = absent + "from bench.__main__ import main\nmain(['kernels', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
