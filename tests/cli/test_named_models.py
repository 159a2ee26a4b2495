"""Models by module, file and library, and what the user's own code raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetconv.autotune.cli import main
from hetconv.autotune.models import named_callable
from hetconv.autotune.models.build import build_model
from hetconv.errors import HetConvError

MODELS = """
import torch
from torch import nn
from helper import WIDTH


class Small(nn.Module):
    def __init__(self, kernel=3):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, kernel)
        self.fc = nn.Linear(7, 2)

    def forward(self, x):
        return self.conv(x)


class Wrong(Small):
    def forward(self, x):
        y = super().forward(x)
        return self.fc(y)


class Plain(nn.Module):
    def forward(self, x):
        return 2 * x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "own_model.py").write_text(MODELS)
    (tmp_path / "nets" / "helper.py").write_text("WIDTH = 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_model", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[object, str]:
    """Runs ``hetconv`` here, and returns its exit status and what it said of errors."""
    monkeypatch.setattr(sys, "argv", ["hetconv", *args])
    with pytest.raises(SystemExit) as end:
        main.main()
    return end.value.code, capsys.readouterr().err


PLAN = ("plan", "--devices", "2xT4", "--input", "1x3x16x16", "--model")


def test_a_model_of_a_file_is_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, capsys, *PLAN, "nets/own_model.py:Small")[0] == 0
    assert (folder / "plan.json").exists()


def test_an_error_of_the_model_names_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (*PLAN, "nets/own_model.py:Wrong")
    status, said = run(monkeypatch, capsys, *wrong)
    assert status == 2
    assert "nets/own_model.py, line 20, in forward: return self.fc(y)" in said
    assert "mat1 and mat2 shapes cannot be multiplied" in said
    assert "--traceback" in said
    assert said.count("\n") == 1
    status, said = run(monkeypatch, capsys, *wrong, "--traceback")
    assert status == 2
    assert "Traceback (most recent call last)" in said


def test_an_error_of_the_constructor_names_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("nets/own_model.py:Small", "--model-args", '{"kernel": "three"}')
    status, said = run(monkeypatch, capsys, *PLAN, *options)
    assert status == 2
    assert "nets/own_model.py, line 10, in __init__: self.conv =" in said


@pytest.mark.parametrize("command", ["plan", "autotune"])
def test_a_model_without_layers_is_refused_before_anything_is_measured(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    devices = "2xT4" if command == "plan" else "cpu,cpu"
    model = ("--model", "nets/own_model.py:Plain", "--input", "1x3x16x16")
    status, said = run(
        monkeypatch, capsys, command, "--devices", devices, *model, "-o", "out.json"
    )
    assert status == 2
    assert said == (
        "hetconv: --model: Plain has no convolution or linear layer, so that there is nothing to "
        "split; name a model that has\n"
    )
    assert not (folder / "out.json").exists()


@pytest.mark.parametrize(
    ("target", "arguments", "made"),
    [
        ("torchvision:resnet18", "{}", "ResNet"),
        ("timm:test_resnet", "{}", "ResNet"),
        ("diffusers:AutoencoderKL", '{"block_out_channels": [32]}', "AutoencoderKL"),
        (
            "transformers:ResNetForImageClassification",
            '{"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}',
            "ResNetForImageClassification",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_of_libraries(target: str, arguments: str, made: str) -> None:
    pytest.importorskip(target.partition(":")[0])
    model = build_model(target, arguments, 0, "bfloat16")
    assert type(model).__name__ == made
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torchvision:resnet5", "has no model 'resnet5'; did you mean resnet50"),
        ("timm:resnet5", "has no model 'resnet5'; did you mean resnet50"),
        ("diffusers:AutoencoderKl", "'AutoencoderKl'; did you mean AutoencoderKL"),
        ("transformers:AutoConfig", "is no model with a configuration"),
        ("nets/none.py:Small", "there is no file nets/none.py"),
        (
            "nets.py:",
            "does not name a callable; write package.module:callable, file.py",
        ),
        ("nets/own_model.py:Smal", "has no 'Smal'; did you mean Small"),
        ("no_such_package:Model", "is it installed, or below"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_name_that_is_not_found(target: str, said: str, folder: Path) -> None:
    library = target.partition(":")[0]
    if library in named_callable.LIBRARIES:
        pytest.importorskip(library)
    with pytest.raises(HetConvError) as e:
        build_model(target, "{}", 0)
    assert said in str(e.value)


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(HetConvError, match="pip install timm"):
        build_model("timm:resnet50", "{}", 0)


def test_inputs_have_the_dtype_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def traced(model: nn.Module, inputs: Any, training: bool) -> Any:
        seen.append((next(model.parameters()).dtype, inputs.args[0].dtype))
        raise HetConvError("seen")

    monkeypatch.setattr("hetconv.autotune.models.build.trace_model", traced)
    run(monkeypatch, capsys, *PLAN, "nets/own_model.py:Small", "--dtype", "float64")
    assert seen == [(torch.float64, torch.float64)]


HELPS = ([], ["--help"], ["--version"], ["autotune", "--help"], ["plan", "--help"])


def test_help_and_version_import_no_torch() -> None:
    program = (
        "import sys; from hetconv.autotune.cli.main import main\n"
        f"for args in {HELPS}:\n"
        "    sys.argv = ['hetconv', *args]\n"
        "    try: main()\n"
        "    except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "autotune" in done.stdout
    assert "hetconv 0.1.0" in done.stdout
