"""Settings of the tests of tuned tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetconv.kernels.tiles import tuned
from hetconv.nn import parallelize
from tests.interpreter import multiplying_in


@pytest.fixture
def no_tiles_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tuned tile is installed, no device was warned of, and float32 is exact."""
    monkeypatch.setattr(tuned, "_installed", {})
    monkeypatch.setattr(parallelize, "_warned_devices", set())
    with multiplying_in("ieee"):
        yield
