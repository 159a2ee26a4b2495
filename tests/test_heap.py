"""What a step frees, the next one finds: no page comes from the system again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from hetconv.heap import CHOSEN, keep_freed
from hetconv.transport import team_of

from .spawn import on_ranks

STEPS = """
import torch
from hetconv.heap import keep_freed, pages_taken

def step():
    x = torch.zeros(6 << 20)  # 24 MiB
    tensors = [x + 1 for _ in range(4)]

def pages():
    before = pages_taken()
    step()
    return pages_taken() - before

kept = keep_freed()
print(kept, min(pages() for _ in range(20)))  # once the heap has settled
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of another C library nothing is known")


def ran(**environment: str) -> tuple[str, int]:
    unset = {name: value for name, value in os.environ.items() if name not in (*CHOSEN, "GLIBC_TUNABLES")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=unset | environment, capture_output=True, text=True, check=True
    )
    kept, pages = done.stdout.split()
    return kept, int(pages)


@glibc
def test_memory_that_a_step_freed_serves_the_next() -> None:
    kept, pages = ran()
    assert kept == "True"
    assert pages < 1000  # of 5 * 24 MiB, 30720 pages of 4 KiB


@glibc
@pytest.mark.parametrize(
    "chosen",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_MAX_": "9"},
        {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
    ],
)
def test_who_chose_another_way_keeps_it(chosen: dict[str, str]) -> None:
    kept, pages = ran(**chosen)
    assert kept == "False"
    assert pages > 1000 or "MALLOC_TRIM_THRESHOLD_" not in chosen


def asked() -> int:
    team_of()
    return keep_freed.cache_info().currsize


def test_ranks_over_gloo_keep_memory() -> None:
    assert on_ranks(2, asked) == [1, 1]
