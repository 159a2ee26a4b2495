"""Fixtures of the tests of Triton's kernels."""

from __future__ import annotations

from typing import Any

import pytest

from hetconv import kernels
from hetconv.kernels.launch import Launch


@pytest.fixture
def by_triton() -> None:
    """Triton computes what it can; `conftest` resets it."""
    kernels.set_backend("triton")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    found: list[str] = []
    run = Launch.run

    def recorded(self: Launch, tensors: Any) -> None:
        found.append(self.kernel.fn.__name__)
        run(self, tensors)

    monkeypatch.setattr(Launch, "run", recorded)
    return found
