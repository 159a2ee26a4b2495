"""Errors that a caller can act on.

Each message says what was given, what was expected and what to do.
"""

from collections.abc import Iterable


class HetConvError(ValueError):
    """Something given to hetconv does not fit. Base of every error that it raises on purpose.

    Cause: An argument, an option or a file that hetconv cannot use, or a call that a
    split model cannot follow.

    Remedy: The message says what was given, what was expected and what to do. Catch
    this class to catch all errors of hetconv.
    """


class SplitError(HetConvError):
    """A split does not fit its operator.

    Cause: The kind is not known, or the sizes do not add up: to the filters or input
    channels of the layer, or to one number for each rank.

    Remedy: Give one size for each rank. `apportion` divides filters or channels in
    proportion to speeds. Sizes of spatial kinds and of samples are proportions, which fit
    any layer.
    """


class LayoutError(HetConvError):
    """Layouts, or a local tensor and its layout, do not fit together.

    Cause: Sizes of a layout do not add up to its dimension, a layout is for another
    number of ranks, or a local tensor does not have the shape of its rank's box.

    Remedy: Make layouts with `Layout.sharded` and `Layout.replicated` from the shape of
    the whole tensor, and give the part that ``layout.boxes[rank]`` describes.
    """


class PlanError(HetConvError):
    """A plan does not fit the model or the ranks.

    Cause: The plan was made from another model or version of it, for another number of
    ranks, or no split fits the memory. Or a layer cannot be split as the plan says.

    Remedy: Make the plan anew with ``hetconv plan``, from this model and a profile of
    these devices. Start one rank for each device of the plan.
    """


class ProfileError(HetConvError):
    """A profile does not fit the devices, or lacks what it was asked for.

    Cause: A device or link is not in the profile or not in the catalog, a link between
    two devices was never measured, or the file is of another version.

    Remedy: Measure the devices together with ``hetconv autotune``, join profiles with
    ``hetconv merge --between``, or choose names that ``hetconv devices`` lists.
    """


class OutputError(HetConvError, OSError):
    """A file cannot be written.

    Cause: The name is one of a folder or a device, permission is missing, or the disk is
    full.

    Remedy: Name a new or a regular file in a folder that may be written. What was there
    before is unchanged.
    """


class DisagreementError(HetConvError):
    """Ranks called the same operation with different arguments; every rank raises this alike.

    Cause: Ranks read different batches, run different versions of the program, or one of
    them takes a branch that others do not take.

    Remedy: Look at the lines that the message names for each rank. Seed samplers alike,
    and make collective calls on every rank, never within ``if rank == 0``.
    """


class LostRankError(HetConvError, RuntimeError):
    """Another rank was killed or stopped, is out of reach, or waits in a different place.

    Cause: A process ended, for instance for lack of memory, a host or its network failed,
    or ranks wait for each other in different calls.

    Remedy: The process group cannot be used any more. Look at the output of the rank that
    the message names, and start all ranks again, from the last checkpoint.
    """


class KernelError(HetConvError):
    """Arguments do not fit a kernel, or its backend is missing.

    Cause: Shapes, data types or devices of tensors do not fit together, or Triton was
    asked for what it cannot compute on this device.

    Remedy: Leave the choice to ``backend="auto"``, which takes ATen wherever Triton
    cannot compute.
    """


def few(names: Iterable[str]) -> str:
    """What a message lists of many names."""
    all_names = list(names)
    return (
        ", ".join(all_names[:8])
        + f" and {len(all_names) - 8} more" * (len(all_names) > 8)
        or "none"
    )
