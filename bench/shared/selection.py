"""Cases of a benchmark that are chosen by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hetconv.errors import HetConvError


def chosen(names: Iterable[str], pattern: str) -> list[str]:
    """Returns the names in which a regular expression is found.

    Args:
        names: All names.
        pattern: The regular expression.

    Raises:
        HetConvError: It is none, or it is found in no name.
    """
    names = list(names)
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as e:
        raise HetConvError(f"--only {pattern!r} is no regular expression: {e}") from e
    if not found:
        raise HetConvError(f"--only {pattern!r} matches none of {', '.join(names)}")
    return found
