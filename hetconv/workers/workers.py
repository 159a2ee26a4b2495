"""`Workers`: split models in a program that no launcher started."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hetconv.errors import HetConvError, PlanError, ProfileError
from hetconv.planner.make_plan import make_plan
from hetconv.runtime.local_rank import check_devices
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas import json_files
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.device_matching import RankDevice, ranks_in_profile
from hetconv.schemas.plan import Plan
from hetconv.tracing.tracer import capture

from .main_module import how_to_import_main, refuse_within_import
from .messages import Call, Load
from .rank_processes import RankProcesses
from .remote_module import RemoteModule
from .transport import Packed, pack, unpack

CLOSED = "close was called"


class _Unplanned(NamedTuple):
    """A model that has not been sent to the workers yet, and how it will be split."""

    model: nn.Module
    fuse: bool
    graphs: bool


class Workers:
    """Processes on several devices in which split models run, for one calling process.

    A notebook, a web service or a node of a graphical program has one process, and no
    launcher such as torchrun. All ranks are other processes of this host: the caller's own
    process group, threads and settings stay as they are, and an error or Ctrl-C leaves
    nothing half-done in it. Models run without gradients. Calls, from any number of
    threads, run one after the other.

    The processes end with `close`, with the ``with`` block, when nothing refers to this
    object or its models any more, and with the calling process, however that ends.

    Args:
        plan_or_profile: How models are split: a plan, for one model, or a profile, from
            which each model is planned. Or the path of such a file, as ``hetconv plan`` and
            ``hetconv autotune`` write them.
        devices: The device of each rank, in the order of the plan, such as
            ``["cuda:0", "cuda:1"]`` or ``["cpu", "cpu@0.5"]``.

    Raises:
        HetConvError: A device is not there, or the processes cannot be started.
        PlanError: The plan is for another number of devices.
        ProfileError: The profile does not have these devices.

    Random numbers are drawn in the workers, which start with this process's initial seed.
    Of PyTorch's settings in this process, autocast alone holds for them.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU()).eval()
        >>> profile = hetconv.ClusterProfile.from_devices(["cpu", "cpu"], link="host")
        >>> with hetconv.Workers(profile, devices=["cpu", "cpu"]) as workers:
        ...     split = workers.parallelize(model)
        ...     y = split(torch.ones(1, 4, 16, 16))
        >>> y.shape
        torch.Size([1, 8, 14, 14])
    """

    def __init__(
        self,
        plan_or_profile: Plan | ClusterProfile | str | Path | None = None,
        devices: Sequence[str | torch.device] | str = (),
    ):
        refuse_within_import()
        how = _loaded(plan_or_profile)
        names = devices.split(",") if isinstance(devices, str) else map(str, devices)
        parsed = [DeviceName.parse(name) for name in names]
        check_devices(parsed)
        _check_number(how, parsed)
        self._lock = Lock()
        self._keys, self._unused = count(), list[int]()
        self._unplanned: dict[int, _Unplanned] = {}
        self._processes = RankProcesses(parsed)
        self._finalizer = weakref.finalize(self, self._processes.end, CLOSED)
        try:
            self._how = self._profile(how) if isinstance(how, ClusterProfile) else how
        except HetConvError:
            self.close()
            raise

    def parallelize(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Any, ...] | None = None,
        *,
        fuse: bool = False,
        graphs: bool = False,
    ) -> RemoteModule:
        """Returns a module that runs the model, split, in the workers.

        It takes and returns what the model does, with tensors of this process: results are
        on the device of the first argument. It has no parameters, and its mode, training or
        evaluation, is that of the model. The model itself stays as it is; where nothing
        else needs it, let the result take its place, and its memory is free.

        Args:
            model: The model, with its weights. Its class must be one that other processes
                can import.
            inputs: A tensor, or a tuple of arguments, of the shapes to plan for. Without
                them, a model is planned at its first call, for the shapes of that. A plan
                that was given needs none.
            fuse: As in `hetconv.parallelize`.
            graphs: Likewise.

        Raises:
            PlanError: The plan does not fit the model, or the model cannot be planned.
            HetConvError: The model cannot be sent, or the workers are closed.

        Example:
            >>> vae.decoder = workers.parallelize(vae.decoder)
            >>> image = vae.decode(latent).sample
        """
        given: object = model
        if not isinstance(given, nn.Module) or isinstance(given, RemoteModule):
            raise HetConvError(
                f"Workers.parallelize takes a plain torch.nn.Module, but was given "
                f"{model!r:.80}; give the module, such as vae.decoder, not a method of it"
            )
        unplanned = _Unplanned(model, fuse, graphs)
        with self._lock:
            self._processes.check_open()
            remote = RemoteModule(model, next(self._keys), self._run)
            if inputs is None and isinstance(self._how, ClusterProfile):
                self._unplanned[remote.key] = unplanned
            else:
                args = inputs if isinstance(inputs, tuple) else (inputs,)
                remote.plan = self._sent(remote.key, unplanned, args, {})
        forget = weakref.finalize(
            remote, _forget, remote.key, self._unplanned, self._unused
        )
        forget.atexit = False
        return remote

    def close(self) -> None:
        """Ends the processes, after the call that is under way in another thread."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self, remote: RemoteModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a model."""
        grad = torch.is_grad_enabled()
        if grad and remote.training:
            raise HetConvError(
                "Workers compute no gradients, but the model is in training mode and called "
                "with gradients enabled; call its eval(), or it within torch.no_grad(). To "
                "train, start ranks with torchrun and use hetconv.parallelize"
            )
        processes = self._processes
        with self._lock:
            processes.check_open()
            given = pack("an argument", (args, kwargs), processes.arguments)
            if grad and given.requires_grad:
                raise HetConvError(
                    "Workers compute no gradients, but an argument requires one; detach it, "
                    "or call the model within torch.no_grad(). To train, start ranks with "
                    "torchrun and use hetconv.parallelize"
                )
            main = how_to_import_main(given.of_main)
            if (unplanned := self._unplanned.get(remote.key)) is not None:
                remote.plan = self._sent(remote.key, unplanned, args, kwargs)
                del self._unplanned[remote.key]
            device = torch.device(given.device or "cpu")
            cast = torch.is_autocast_enabled(device.type)
            unused = tuple(self._unused.pop() for _ in range(len(self._unused)))
            call = Call(
                remote.key,
                given,
                remote.training,
                torch.get_autocast_dtype(device.type) if cast else None,
                main,
                unused,
            )
            result = processes.ask(call).value
            assert isinstance(result, Packed)
            return unpack(result, processes.results, device)

    def _sent(
        self,
        key: int,
        unplanned: _Unplanned,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Plan:
        """Plans a model, unless a plan was given, and sends it to the workers."""
        model, fuse, graphs = unplanned
        plan, processes = self._how, self._processes
        if isinstance(plan, ClusterProfile):
            with torch.no_grad():
                graph = capture(model, *args, **kwargs)
            plan = make_plan(graph, plan, mode="infer")
        try:
            packed = pack("the model", model, processes.models, views=True)
            main = how_to_import_main(packed.of_main)
            processes.ask(Load(key, packed, plan, fuse, graphs, main))
        finally:
            if processes.closed is None:
                processes.models.clear()
        return plan

    def _profile(self, profile: ClusterProfile) -> ClusterProfile:
        """Returns the profile of the ranks' devices, in the order of ranks."""
        if not any(device.identity for device in profile.devices):  # from data sheets
            return profile
        ranks = [RankDevice(identity) for identity in self._processes.identities]
        return profile.subset(ranks_in_profile(profile, ranks))


def _forget(key: int, unplanned: dict[int, _Unplanned], unused: list[int]) -> None:
    """Drops a model that is not used any more, in the workers with the next call."""
    unplanned.pop(key, None)
    unused.append(key)


def _loaded(how: Plan | ClusterProfile | str | Path | None) -> Plan | ClusterProfile:
    if isinstance(how, (str, Path)):
        of_profile = json_files.format_of(how) == "hetconv-profile"
        return ClusterProfile.load(how) if of_profile else Plan.load(how)
    given: object = how
    if isinstance(given, (Plan, ClusterProfile)):
        return given
    what = "nothing" if how is None else f"{how!r:.60}"
    raise HetConvError(
        "Workers take a plan or a profile, or the path of its file, which tell how fast the "
        f"devices are, but got {what}; measure them once with `hetconv autotune`, and give "
        "its cluster.json"
    )


def _check_number(how: Plan | ClusterProfile, devices: Sequence[DeviceName]) -> None:
    """Raises an error unless a plan, or a profile of data sheets, is for so many devices."""
    exact = isinstance(how, Plan) or not any(d.identity for d in how.devices)
    if not devices or how.world < len(devices) or (exact and how.world != len(devices)):
        what, error = (
            ("plan", PlanError) if isinstance(how, Plan) else ("profile", ProfileError)
        )
        names = ", ".join(map(str, devices)) or "none"
        raise error(
            f"the {what} is for {how.world} devices, but {len(devices)} were named ({names}); "
            "name one per rank, such as devices=['cuda:0', 'cuda:1']"
        )
