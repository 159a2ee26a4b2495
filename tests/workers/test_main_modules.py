"""Programs that start workers: with and without a file, with and without a guard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

START = """\
import torch, hetconv
from torch import nn
class Net(nn.Conv2d): pass
profile = hetconv.ClusterProfile.from_devices(["cpu"], link="host")
"""
CALLS = """\
with hetconv.Workers(profile, devices=["cpu"]) as workers:
    for kind in {}:
        split = workers.parallelize(kind(2, 3, 1).eval())
        print(*split(torch.ones(1, 2, 5, 4)).shape)
"""
GUARDED = "if __name__ == '__main__':\n" + CALLS
GUARDED = GUARDED.replace("\n", "\n    ").rstrip()


@pytest.mark.parametrize(
    ("calls", "as_file", "refused"),
    [
        (CALLS.format("(nn.Conv2d, Net)"), True, 'if __name__ == "__main__":'),
        (CALLS.format("(nn.Conv2d, Net)"), False, "Net of __main__ cannot be imported"),
        (GUARDED.format("(nn.Conv2d, Net)"), True, None),
    ],
    ids=["a file", "stdin", "a guarded file"],
)
def test_its_own_classes_need_a_file_that_starts_nothing_when_it_is_imported(
    calls: str, as_file: bool, refused: str | None, tmp_path: Path
) -> None:
    text, file = START + calls, tmp_path / "program.py"
    file.write_text(text)
    process = subprocess.run(
        [sys.executable, str(file) if as_file else "-"],
        input="" if as_file else text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert process.stdout == "1 3 5 4\n" * (1 if refused else 2)
    if refused:
        assert "HetConvError" in process.stderr
        assert refused in process.stderr
    else:
        assert not process.stderr
