"""Errors that a caller can act on.

Each message says what was given, what was expected and what to do.
"""

from collections.abc import Iterable


class HetConvError(ValueError):
    """Something given to hetconv does not fit. Base of every error that it raises on purpose."""


class SplitError(HetConvError):
    """A split that does not fit its operator: an unknown kind, or sizes that do not add up."""


class LayoutError(HetConvError):
    """Layouts, or a local tensor and its layout, that do not fit together."""


class PlanError(HetConvError):
    """A plan that does not fit: another model, world size, or schema version."""


class ProfileError(HetConvError):
    """A profile that does not fit, or does not know what it was asked."""


class OutputError(HetConvError, OSError):
    """A file that cannot be written: a folder, a device, without permission or space."""


class DisagreementError(HetConvError):
    """Ranks called the same operation with different arguments; every rank raises this alike."""


class LostRankError(HetConvError, RuntimeError):
    """Another rank was killed or stopped, is out of reach, or waits in a different place.

    The process group cannot be used any more. Start all ranks again, from the last checkpoint.
    """


class KernelError(HetConvError):
    """Arguments that a kernel does not take, or a missing backend."""


def few(names: Iterable[str]) -> str:
    """What a message lists of many names."""
    all_names = list(names)
    return (
        ", ".join(all_names[:8])
        + f" and {len(all_names) - 8} more" * (len(all_names) > 8)
        or "none"
    )
