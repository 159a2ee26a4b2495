"""Programs of other libraries: started by torchrun, each computes what it computes without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests import ROOT

TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --standalone".split()
# The library that each needs, and what it writes of interest.
EXAMPLES = {
    "vae_decode": ("diffusers", ""),
    "unet3d_sliding_windows": ("monai", ""),
    "accelerate_training": ("accelerate", "model.safetensors optimizer.bin"),
    "fabric_training": ("lightning", ""),
    "trainer_loop": ("transformers", "model.safetensors"),
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def started(launcher: list[str], name: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py")]
    env = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, str(out)],
        cwd=out.parent,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def tensors_of(path: Path) -> list[Tensor]:
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return [x for _, x in sorted(load_file(path).items())]
    found: list[Any] = tree_leaves(torch.load(path))
    return [x for x in found if isinstance(x, Tensor)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_computes_the_same_as_the_plain_program(
    name: str, tmp_path: Path
) -> None:
    library, files = EXAMPLES[name]
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    outs = [tmp_path / "plain", tmp_path / "split"]
    running = [started([], name, outs[0]), started(TORCHRUN, name, outs[1])]
    try:
        plain, split = (each.communicate()[0] for each in running)
    finally:
        for each in running:
            each.terminate()  # torchrun ends its ranks
    assert [each.returncode for each in running] == [0, 0], plain + split

    # Not by lines: that of one rank may begin within that of the other.
    assert sorted(re.findall(r"rank (\d): ", split)) == ["0", "1"]
    assert "alone" not in split
    shown = [re.findall(r"(?:loss|norm) (\d\S+\d)", x) for x in (plain, split)]
    before, after = ([float(x) for x in each] for each in shown)
    assert after[: len(before)] == pytest.approx(before, rel=1e-4)
    for file in files.split() or [""]:
        pairs = zip(*(tensors_of(out / file) for out in outs), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs), file


def test_the_examples_are_short() -> None:
    for name in EXAMPLES:
        lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
        assert len(lines) <= 60, name
