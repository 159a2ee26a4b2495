"""The public names: each is what its room has, comes when it is asked for, and brings
no more than it needs.
"""

import subprocess
import sys
from importlib import import_module

import pytest

import hetconv

ABSENT = "import sys\nfor name in 'optuna pydantic rich typer'.split(): sys.modules[name] = None\n"
WITHOUT = {
    "kernels": """
import torch
from hetconv import kernels
x, w = torch.ones(1, 2, 4, 4, requires_grad=True), torch.ones(3, 2, 3, 3)
kernels.conv2d(x, w, padding=1).sum().backward()
assert x.grad is not None and x.grad[0, 0, 1, 1] == 27
""",
    "kernels as an attribute": "import hetconv\nassert callable(hetconv.kernels.conv2d)",
    "spec and errors": "import hetconv.errors, hetconv.sharding.conv_spec\nassert 'torch' not "
    "in sys.modules",
    "errors as names": "import hetconv\nassert issubclass(hetconv.KernelError, "
    "hetconv.HetConvError)",
    "layouts": "import hetconv\nassert hetconv.apportion(3, (2, 1)) == (2, 1)",
}


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", hetconv.__all__)
def test_every_name_is_what_its_room_has(name: str) -> None:
    value = getattr(hetconv, name)
    assert getattr(hetconv, name) is value
    assert name in dir(hetconv)
    if name == "kernels":
        assert value is import_module("hetconv.kernels")
    else:
        assert value.__module__.startswith("hetconv.")
        assert getattr(import_module(value.__module__), name) is value


def test_every_error_is_public() -> None:
    errors = import_module("hetconv.errors")
    assert {n for n in vars(errors) if n.endswith("Error")} <= set(hetconv.__all__)


def test_the_table_has_every_name_once() -> None:
    listed = [name for names in hetconv._MODULES.values() for name in names.split()]
    assert sorted([*listed, "kernels"]) == hetconv.__all__


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(
        AttributeError, match=r"no public name 'paralelize'.*parallelize"
    ):
        _ = hetconv.paralelize  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="paralelize"):
        exec("from hetconv import paralelize")


@pytest.mark.parametrize("code", WITHOUT.values(), ids=WITHOUT)
def test_works_without_what_only_planning_and_commands_need(code: str) -> None:
    run(ABSENT + code)


def test_importing_hetconv_imports_little() -> None:
    heavy = "torch triton numpy pydantic optuna typer rich"
    run(f"import sys, hetconv\nassert not sys.modules.keys() & set({heavy!r}.split())")


def test_a_het_tensor_works_in_a_process_that_imports_nothing_else() -> None:
    run("""
import torch, torch.distributed as dist, hetconv
from hetconv.comm.rank_group import rank_group_of
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layout = hetconv.Layout.replicated((2, 3), 1)
x = hetconv.HetTensor.wrap(torch.ones(2, 3), layout, rank_group_of())
assert (x + 1).sum() == 12
dist.destroy_process_group()
""")
