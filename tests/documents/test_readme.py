"""README's use of hetconv runs, on two CPU cores in place of two GPUs; and it stays short."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import ROOT
from tests.documents.pages import SHELLS, Block, blocks
from tests.documents.test_snippets import ELSEWHERE, page_variables, start

README = "README.md"
MAX_LINES, MAX_COLUMNS = 110, 120
ON_CPUS = {
    "cuda:0,cuda:1": "cpu,cpu",
    "1x3x1024x1024 -o cluster.json": "1x3x32x32 -o cluster.json --budget 5 --trials 0",
    "1x3x1024x1024": "1x3x32x32",
    'torch.device("cuda", int(os.environ["LOCAL_RANK"]))': 'torch.device("cpu")',
    '"nccl", device_id=device': '"gloo"',
}
NET = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        pool = nn.AdaptiveAvgPool2d(1)
        super().__init__(nn.Conv2d(3, 8, 3), pool, nn.Flatten(), nn.Linear(8, 10))


def batches(device):
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        images = torch.rand(2, 3, 32, 32, generator=generator)
        yield images.to(device), torch.randint(10, (2,), generator=generator).to(device)
"""


@pytest.mark.slow
def test_its_use_runs(tmp_path: Path) -> None:
    used = [b for b in blocks(README) if not ELSEWHERE.search(b.text)]
    assert [b.language in SHELLS for b in used] == [True, False]
    commands, program = (_on_cpus(block) for block in used)
    assert all(there in used[0].text + used[1].text for there in ON_CPUS)
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "train.py").write_text(program.text, encoding="utf-8")
    start(commands, tmp_path, page_variables(tmp_path))
    assert os.listdir(tmp_path / "run"), "no checkpoint"


def _on_cpus(block: Block) -> Block:
    text = block.text
    for there, here in ON_CPUS.items():
        text = text.replace(there, here)
    return block._replace(text=text)


def test_it_is_short() -> None:
    lines = (ROOT / README).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
