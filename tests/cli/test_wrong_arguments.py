"""Wrong arguments: exit status 2, one message that says what was given, and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetconv.autotune.cli import main

MODEL = """
from torch import nn


class Net(nn.Conv2d):
    def __init__(self, kernel=3):
        super().__init__(3, 8, kernel)


class Raises(Net):
    def forward(self, x):
        raise KeyError("nothing")


value = 3


def no_module():
    return 5
"""
FILES = {
    "net.py": MODEL,
    "syntax.py": "def f(:\n",
    "imports.py": "import not_there\n",
    "list.json": "[1, 2]",
    "other.json": '{"format": "other"}',
    "no.json": "nothing",
}
USUAL = {"--model": "net.py:Net", "--input": "1x3x16x16"}
TUNE = {"--devices": "cpu,cpu", "--budget": "2", **USUAL}
PLAN = {"--devices": "2xT4", **USUAL}
# Options that replace the usual ones (None leaves one out), and what is said.
AUTOTUNE_CASES: list[tuple[dict[str, str | None], str]] = [
    ({"--devices": None}, "Missing option"),
    ({"--model": None}, "Missing option"),
    ({"--input": None}, "no inputs were given"),
    ({"--devices": ""}, "device '' is not understood"),
    ({"--devices": "cpu,,cpu"}, "device '' is not understood"),
    ({"--devices": "tpu"}, "device 'tpu' is not understood"),
    ({"--devices": "cpu@x"}, "cpu@0.5 for half speed"),
    ({"--devices": "cpu@0"}, "between 0 and 1"),
    ({"--devices": "cpu@2"}, "between 0 and 1"),
    ({"--devices": "cuda:98,cuda:99"}, "'cuda:98' is not there; this process"),
    ({"--trials": "-1"}, "--trials"),
    ({"--trials": "two"}, "--trials"),
    ({"--budget": "0"}, "--budget"),
    ({"--budget": "inf"}, "--budget"),
    ({"--budget": "nan"}, "--budget"),
    ({"--mode": "both"}, "not one of"),
    ({"--dtype": "int8"}, "not one of"),
    ({"--nothing": "1"}, "No such option"),
    ({"-o": "/dev/full"}, "is not a regular file"),
    ({"-o": "."}, "is a folder"),
    ({"-o": "net.py/x.json"}, "cannot be written"),
    ({"--model": "net"}, "does not name a callable"),
    ({"--model": "net:"}, "does not name a callable"),
    ({"--model": ":Net"}, "does not name a callable"),
    ({"--model": "net:nothing"}, "has no 'nothing'"),
    ({"--model": "net:value"}, "cannot be called; name a callable"),
    ({"--model": "net:no_module"}, "not a torch.nn.Module"),
    ({"--model": "net:Raises"}, "net.py, line 12, in forward"),
    ({"--model": "none.py:Net"}, "there is no file none.py"),
    ({"--model": "syntax.py:f"}, "SyntaxError"),
    ({"--model": "imports.py:f"}, "imports.py, line 1"),
    ({"--model": "no_such_module:f"}, "is it installed"),
    ({"--model-args": "{"}, "is not JSON"),
    ({"--model-args": "3"}, "must be a JSON object or list"),
    ({"--model-args": '{"z": 1}'}, "unexpected keyword argument 'z'"),
    ({"--input": "0x3"}, "write positive sizes"),
    ({"--input": "axb"}, "write positive sizes"),
    ({"--input": ""}, "write positive sizes"),
    ({"--input": "1x4x16x16"}, "cannot be called with --input of (1, 4, 16, 16)"),
    ({"--input": "y=1x3x16x16"}, "unexpected keyword argument 'y'"),
    ({"--input": "1x3x16x16:float8"}, "dtype 'float8' is not known; choose one of"),
    ({"--inputs": "net:value"}, "give one of these options"),
]
PLAN_CASES: list[tuple[dict[str, str | None], str]] = [
    ({"--memory-limit": "-1"}, "--memory-limit"),
    ({"--memory-limit": "nan"}, "--memory-limit"),
    ({"--kinds": "hight"}, "choose one of"),
    ({"--kinds": ""}, "choose one of"),
    ({"--link": "rope"}, "pcie4-x16"),
    ({"--between": "rope"}, "all devices are in one node"),
    ({"--devices": "T5"}, "RTX-4090"),
    ({"--devices": "0xT4"}, "names no device"),
    ({"--devices": ""}, "names no device"),
    ({"--profile": "list.json"}, "give one, measured or catalogued"),
    ({"--devices": None, "--profile": "list.json"}, "format is 'list'"),
    ({"--devices": None, "--profile": "none.json"}, "cannot be read"),
    ({"--devices": None, "--link": "nvlink2"}, "name them with --devices"),
    ({"--trace": "/dev/full"}, "is not a regular file"),
    ({"-o": "/dev/null/x"}, "cannot be written"),
    ({"--seed": "x"}, "--seed"),
    ({"--mode": "x"}, "not one of"),
]
OTHER_CASES = [
    ("nothing", "No such command"),
    ("show", "Missing argument"),
    ("show none.json", "cannot be read as a plan or a profile"),
    ("show no.json", "cannot be read as a plan or a profile"),
    ("show .", "cannot be read as a plan or a profile"),
    ("show list.json", "it holds a list, not an object"),
    ("show other.json", "it holds format 'other'"),
    ("diff none.json none.json", "cannot be read"),
    ("diff list.json list.json", "format is 'list'"),
    ("merge -o out.json", "Missing argument"),
    ("merge list.json -o out.json", "format is 'list'"),
    ("merge other.json -o /dev/full", "is not a regular file"),
    ("schema nothing", "not one of"),
    ("doctor --devices gpu:0", "is not understood"),
    ("doctor --devices cuda:99", "is not there"),
    ("doctor --timeout 0", "--timeout"),
]


def arguments(
    command: str, usual: dict[str, str], cases: list[tuple[dict[str, str | None], str]]
) -> list[tuple[list[str], str]]:
    found = []
    for changed, said in cases:
        options = {k: v for k, v in (usual | changed).items() if v is not None}
        found.append(
            ([command, *(word for pair in options.items() for word in pair)], said)
        )
    return found


@pytest.mark.parametrize(
    ("args", "said"),
    [
        *arguments("autotune", TUNE, AUTOTUNE_CASES),
        *arguments("plan", PLAN, PLAN_CASES),
        *((line.split(), said) for line, said in OTHER_CASES),
    ],
)
def test_one_message_and_no_traceback(
    args: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("net", "syntax", "imports"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", ["hetconv", *args])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as end:
        main.main()
    shown, errors = capsys.readouterr()
    assert end.value.code == 2
    assert said in errors
    assert "Traceback" not in errors
    assert not shown
    by_hetconv = [line for line in errors.splitlines() if line.startswith("hetconv:")]
    assert len(by_hetconv) == 1 or "Error" in errors
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {*FILES}
