"""What models are called with, as the command line says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import hetconv
from hetconv.autotune.models.build import formatted
from hetconv.autotune.models.inputs import (
    DTYPES,
    InputSpec,
    ModelInputs,
    TensorSpec,
    parse_shape,
)
from hetconv.autotune.search.race import PlainModel, plain_step, step_of
from hetconv.sharding.conv_spec import MemoryFormat

from .test_commands import PAIR, hetconv_command

Command = Callable[..., tuple[int, str, str]]
HERE = "tests.cli.test_model_inputs"
MODEL = ("--model", f"{HERE}:Timed")
IMAGE = "1x3x16x16"


class Timed(nn.Module):
    """An image, and the time of each sample as the index of an embedding; a scale by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.times = nn.Conv2d(3, 8, 3, padding=1), nn.Embedding(2, 8)

    def forward(
        self, x: Tensor, timestep: Tensor, *, scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        y: Tensor = self.conv(x) + self.times(timestep)[:, :, None, None]
        return {"sample": y if scale is None else y * scale}


def arguments() -> Any:
    return [torch.randn(1, 3, 16, 16)], {"timestep": torch.ones(1, dtype=torch.int64)}


def image_alone() -> Tensor:
    return torch.randn(1, 3, 16, 16)


def image_and_names() -> Any:
    return torch.randn(1, 3, 16, 16), {}


def numbered() -> Any:
    return (), {1: torch.ones(1)}


def failing() -> Any:
    raise RuntimeError("there is no such file")


NO_CALLABLE = 3
NAMED = ("--input", IMAGE, "--input", "timestep=1:int64")
ORDERED = (
    "--input",
    "1,3,16,16:float32",
    "--input",
    "1:int64",
    "--input",
    "scale=1,8,1,1",
)
MADE = ("--inputs", f"{HERE}:arguments")


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        (NAMED, ((1, 3, 16, 16), (1,))),
        (NAMED[2:] + NAMED[:2], ((1, 3, 16, 16), (1,))),
        (ORDERED, ((1, 3, 16, 16), (1,), (1, 8, 1, 1))),
        (MADE, ((1, 3, 16, 16), (1,))),
    ],
)
def test_a_model_of_several_arguments_is_planned(
    given: tuple[str, ...], shapes: tuple[Any, ...], tmp_path: Path, command: Command
) -> None:
    status, _, wrong = command("plan", "--devices", "T4,T4", *MODEL, *given)
    assert status == 0, wrong
    plan = hetconv.Plan.load(tmp_path / "plan.json")
    assert plan.inputs == shapes
    assert "conv" in plan.splits


@pytest.mark.slow
def test_a_model_of_several_arguments_is_tuned(tmp_path: Path) -> None:
    done = hetconv_command(
        "autotune",
        *PAIR,
        *MODEL,
        *MADE,
        "--trials",
        "1",
        "--budget",
        "2",
        "-o",
        "cluster.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert hetconv.ClusterProfile.load(tmp_path / "cluster.json").names == (
        "cpu",
        "cpu@0.5",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "no inputs were given; give --input"),
        (
            (*NAMED, *MADE),
            (
                "--input 1x3x16x16 and --inputs tests.cli.test_model_inputs:arguments were given; "
                "give one"
            ),
        ),
        (
            ("--input", "1x3xbig"),
            "--input '1x3xbig': '1x3xbig' is not a shape; write positive sizes",
        ),
        (("--input", "1,3x16"), "'1,3x16' is not a shape"),
        (("--input", "x=1x0:int64"), "--input 'x=1x0:int64': '1x0' is not a shape"),
        (("--input", ":int64"), "--input ':int64': '' is not a shape"),
        (
            ("--input", "2:integer"),
            "dtype 'integer' is not known; choose one of float32, float64",
        ),
        (("--input", "a=b=2"), "--input 'a=b=2' is not understood"),
        (("--input", "time step=2"), "'time step' is no name of an argument"),
        (("--input", "=2"), "'' is no name of an argument"),
        (
            (*NAMED, "--input", "timestep=1:int64"),
            "--input names timestep more than once",
        ),
        (
            ("--input", IMAGE),
            "Timed cannot be called with --input of (1, 3, 16, 16): TypeError",
        ),
        (
            ("--input", IMAGE, "--input", "time=1:int64"),
            "unexpected keyword argument 'time'",
        ),
        (
            ("--inputs", HERE),
            "--inputs 'tests.cli.test_model_inputs' does not name a callable; write package.module",
        ),
        (
            ("--inputs", "nowhere:inputs"),
            "--inputs: module 'nowhere' cannot be imported",
        ),
        (
            ("--inputs", "tests.data.failing_module:inputs"),
            (
                "failing_module.py, line 3, in <module>: None.missing  # type: "
                "ignore[attr-defined]  # noqa: B018: AttributeError: 'NoneType' object has no"
            ),
        ),
        (
            ("--inputs", f"{HERE}:missing"),
            "--inputs: module 'tests.cli.test_model_inputs' has no 'missing'",
        ),
        (
            ("--inputs", f"{HERE}:NO_CALLABLE"),
            "--inputs: tests.cli.test_model_inputs:NO_CALLABLE is of type int and cannot be called",
        ),
        (
            ("--inputs", f"{HERE}:image_alone"),
            "returned a Tensor; return (args, kwargs), a tuple and a dict",
        ),
        (
            ("--inputs", f"{HERE}:image_and_names"),
            "returned a tuple of Tensor, dict; return (args, kwargs)",
        ),
        (
            ("--inputs", f"{HERE}:numbered"),
            "returned keyword arguments whose names are no strings: [1]",
        ),
        (
            ("--inputs", f"{HERE}:failing"),
            "RuntimeError: there is no such file",
        ),
        (
            ("--inputs", f"{HERE}:parse_shape"),
            "called without arguments: TypeError: parse_shape() missing",
        ),
    ],
)
@pytest.mark.parametrize("asked", [("plan", "--devices", "T4,T4"), ("autotune", *PAIR)])
def test_what_is_wrong_is_said_in_one_line(
    asked: tuple[str, ...],
    given: tuple[str, ...],
    said: str,
    tmp_path: Path,
    command: Command,
) -> None:
    status, _, wrong = command(*asked, *MODEL, *given)
    assert status == 2
    assert said in wrong
    assert wrong.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("2x3x8X9", TensorSpec((2, 3, 8, 9))),
        ("2, 3", TensorSpec((2, 3))),
        ("2:int64", TensorSpec((2,), "int64")),
        ("timestep=2:int64", TensorSpec((2,), "int64", "timestep")),
        ("mask=1,4:bool", TensorSpec((1, 4), "bool", "mask")),
    ],
)
def test_a_tensor_is_read_and_written(text: str, spec: TensorSpec) -> None:
    assert TensorSpec.parse(text) == TensorSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_are_the_same_each_time(dtype: str) -> None:
    given = InputSpec.parse([f"2x3:{dtype}", f"x=4:{dtype}"], None)
    first, again = given.make(3), given.make(3)
    assert first.args[0].dtype == DTYPES[dtype]
    assert first.args[0].shape == (2, 3)
    assert torch.equal(first.args[0], again.args[0])
    assert torch.equal(first.kwargs["x"], again.kwargs["x"])
    numbers = DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex
    assert bool(first.args[0].any()) is numbers


def test_what_a_callable_makes_is_the_same_each_time() -> None:
    given = InputSpec.parse([], f"{HERE}:arguments")
    assert torch.equal(given.make(3).args[0], given.make(3).args[0])
    assert not torch.equal(given.make(3).args[0], given.make(4).args[0])


def test_steps_take_all_arguments_in_the_memory_format_of_images() -> None:
    inputs = InputSpec.parse([IMAGE, "1:int64", "scale=1x8x1x1"], None).make(0)
    model, last = formatted(Timed(), inputs, "channels_last")
    assert last.args[0].is_contiguous(memory_format=torch.channels_last)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last.args[1], inputs.args[1])
    assert last.args[1].dtype == torch.int64
    step_of(model, last, "train")()
    assert all(p.grad is not None for p in model.parameters())
    for layout in get_args(MemoryFormat):
        plain_step(PlainModel(0, layout), model, last, "infer")()


def test_images_beside_volumes_have_a_format_each() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.deep = nn.Conv2d(2, 4, 3), nn.Conv3d(2, 4, 3)

    inputs = ModelInputs.of(torch.ones(1, 2, 4, 4), volume=torch.ones(1, 2, 4, 4, 4))
    model, last = formatted(Both(), inputs, "channels_last")
    formats = (torch.channels_last, torch.channels_last_3d)
    for format_, tensors in zip(
        formats,
        ((last.args[0], model.flat.weight), (last.kwargs["volume"], model.deep.weight)),
        strict=True,
    ):
        assert all(x.is_contiguous(memory_format=format_) for x in tensors)


def test_shapes_are_read() -> None:
    assert parse_shape("2x3x8x9") == parse_shape("2,3,8,9") == (2, 3, 8, 9)
