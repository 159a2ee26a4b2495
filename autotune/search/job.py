"""A tuning job, and what its stages share on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.measure import timer
from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.models.build import build_model, formatted, trace_model
from hetconv.autotune.models.inputs import InputSpec, ModelInputs
from hetconv.comm.rank_group import RankGroup, all_gather_object, rank_group_of
from hetconv.errors import HetConvError
from hetconv.kernels import fastest_format
from hetconv.runtime.throttle import DeviceName
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import adapter
from hetconv.schemas.plan import Mode
from hetconv.schemas.provenance import MeasurementConditions
from hetconv.sharding.conv_spec import MemoryFormat
from hetconv.tracing.graph import Graph

from .journal import Store, claimed
from .race import Race

T = TypeVar("T")
STAGES = "stages"  # the stage under which the store has the profile after each stage
TILES_PART = 0.25  # of the budget where there is a GPU; the others share the rest
END_S = 2.0  # in which the ranks end and the result is printed
MIN_TIMEOUT_S = 60.0  # that a rank waits for another one within a trial


@dataclass(frozen=True)
class Job:
    """What `hetconv autotune` was asked for.

    Attributes:
        devices: one for each rank.
        model: what makes the model, of `find_callable`.
        model_args: its arguments, as JSON.
        inputs: what the model is called with.
        mode: what a step is.
        trials: how many trials a study has at most.
        budget: seconds, about.
        output: the profile to write.
        seed: of weights, inputs and studies.
        resume: whether what an interrupted run of the same job measured is not measured
            again.
        storage: the URL of a database for the studies' trials, in place of the journal.
        quiet: whether nothing is said but errors.
        verbose: whether everything is said that is measured.
        dtype: of the model; None if it stays as it is built.
        began: when the command began, by this host's monotonic clock: the budget is for
            all of it.
    """

    devices: tuple[DeviceName, ...]
    model: str
    model_args: str
    inputs: InputSpec
    mode: Mode
    trials: int
    budget: float
    output: Path
    seed: int
    resume: bool = False
    storage: str | None = None
    quiet: bool = False
    verbose: bool = False
    dtype: str | None = None
    began: float = field(default_factory=time.monotonic)


class Run:
    """One rank's side of a job that is under way; rank 0 has the ``store``. Collective.

    Args:
        job: what was asked for.
        say: tells a person how far the job is.
        stack: ends the claim of the journal.

    Raises:
        HetConvError: on all ranks, if the journal is another process's or job's.
    """

    def __init__(self, job: Job, say: Reporter, stack: ExitStack):
        self.job, self.say, self.group = job, say, rank_group_of()
        self.name = job.devices[self.group.rank]
        self.device = torch.device(self.name.device)
        training = job.mode == "train"
        model = build_model(job.model, job.model_args, job.seed, job.dtype)
        model = model.to(self.device).train(training)
        inputs = job.inputs.make(job.seed).to(self.device)
        self.model: nn.Module
        self.inputs: ModelInputs
        self.memory_format = _agreed_format(self.group, self.device)
        self.model, self.inputs = formatted(model, inputs, self.memory_format)
        self.graph: Graph = trace_model(self.model, self.inputs, training)
        timeout_s = max(MIN_TIMEOUT_S, job.budget / 4)
        self.on_gpu = any(torch.device(d.device).type == "cuda" for d in job.devices)
        self.race = Race(
            self.model, self.inputs, job.mode, timeout_s, lambda: self.left_s
        )
        self.store: Store | None = None
        refusal = None
        if self.group.rank == 0:
            try:
                self.store = self._open_store(stack)
            except HetConvError as e:  # all ranks raise it
                refusal = str(e)
        known = self.store.known if self.store is not None else {}
        refusal, self._known = timer.broadcast_object((refusal, known))
        if refusal is not None:
            raise HetConvError(refusal)

    @property
    def conditions(self) -> MeasurementConditions:
        """The conditions of a measurement of this rank now."""
        return conditions(self.device, self.memory_format)

    def _open_store(self, stack: ExitStack) -> Store:
        job, now = self.job, self.conditions
        asked = {
            "model": " ".join(filter(None, (job.model, job.model_args, job.dtype))),
            "graph": self.graph.digest,
            "inputs": str(job.inputs),
            "mode": job.mode,
            "devices": [str(d) for d in job.devices],
            "seed": job.seed,
            "memory format": self.memory_format,
            "torch": now.torch,
            "triton": now.triton,
        }
        file = stack.enter_context(claimed(job.output))
        store = Store(file, asked, resume=job.resume, url=job.storage)
        stack.callback(store.close)
        return store

    def passed(self, part: float) -> Callable[[], bool]:
        """Returns a function that tells whether this part of the budget is spent."""
        return lambda: self.spent > part

    @property
    def spent(self) -> float:
        """The part of the budget that is spent."""
        return self.seconds / self.job.budget

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left for all stages but that of tiles."""
        return part_of(self, 1.0) * self.job.budget - END_S - self.seconds

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.job.began

    def known(self, stage: str, key: str, type_: type[T]) -> T | None:
        """Returns what was kept, if it was.

        Args:
            stage: of the job.
            key: what it is of.
            type_: what it is.
        """
        found = self._known.get((stage, key))
        return adapter(type_).validate_python(found) if found is not None else None

    def keep(self, stage: str, key: str, value: Any) -> None:
        """Writes a value, which is on rank 0's disk when this returns there."""
        if self.store is not None:
            document = adapter(type(value)).dump_python(value, mode="json")
            self.store.keep(stage, key, document)

    def finished(self, stage: str) -> ClusterProfile | None:
        """Returns the profile after a stage that had no less effort than this job's."""
        found = self._known.get((STAGES, stage))
        if (
            found is None
            or found["budget"] < self.job.budget
            or found["trials"] < self.job.trials
        ):
            return None
        return adapter(ClusterProfile).validate_python(found["profile"])

    def finish(self, stage: str, profile: ClusterProfile) -> ClusterProfile:
        """Writes rank 0's profile, whole, to where the job wants it and to the store.

        Collective; returns it on every rank.
        """
        profile = timer.broadcast_object(profile)
        if self.store is not None:
            profile.save(self.job.output)
            document = adapter(ClusterProfile).dump_python(profile, mode="json")
            effort = {"budget": self.job.budget, "trials": self.job.trials}
            self.store.keep(STAGES, stage, effort | {"profile": document})
        return profile

    def led(self, lead: Callable[[], T]) -> T:
        """Runs ``lead`` on rank 0, whose races the other ranks follow meanwhile.

        Collective; returns its result on every rank.
        """
        result = None
        if self.group.rank == 0:
            result = lead()
            self.race.end()
        else:
            self.race.follow()
        shared: T = timer.broadcast_object(result)
        return shared


def _agreed_format(group: RankGroup, device: torch.device) -> MemoryFormat:
    """Returns the memory format that is fastest on all ranks, or channels-last."""
    fastest = set(all_gather_object(group, fastest_format(device)))
    return fastest.pop() if len(fastest) == 1 else "channels_last"


def part_of(run: Run, part: float) -> float:
    """Scales a part of the budget to what the stage of tiles leaves.

    Args:
        run: the job.
        part: of the budget, as on CPUs.
    """
    return part * (1 - TILES_PART if run.on_gpu else 1)
