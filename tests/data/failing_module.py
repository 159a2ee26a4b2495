"""A module whose import fails in its own code."""

None.missing  # type: ignore[attr-defined]  # noqa: B018
