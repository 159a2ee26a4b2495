"""What Triton's compiler makes of launches, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import ROOT


def check_wide_moves(code: str, cache: Path, count: int) -> None:
    """``code`` prints so many compile reports by name: no spill, no access under 16 bytes."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert len(found) == count
    for name, e in found.items():
        assert e["spills"] == 0, name
        assert e["loads_128"] > 0, name
        assert e["stores_128"] > 0, name
        assert e["loads_narrow"] == e["stores_narrow"] == 0, name
