"""Cases of a benchmark that are chosen by name."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable

from bench.shared.machine import add_output_argument
from hetconv.errors import HetConvError


def add_arguments(parser: ArgumentParser, what: str) -> None:
    """Adds the options ``--only`` and ``--output``.

    Args:
        parser: Parser of the benchmark.
        what: What the cases are, in the plural.
    """
    parser.add_argument(
        "--only", metavar="REGEX", default="", help=f"{what} whose names match"
    )
    add_output_argument(parser)


def whole_number(at_least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers; argparse refuses what it cannot parse."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise ArgumentTypeError(
                f"{text!r} is not a whole number of at least {at_least}"
            )
        return int(text)

    return parse


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
