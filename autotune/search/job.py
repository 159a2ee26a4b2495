"""A tuning job, and what its stages share on every rank: the model, the group, and what
was measured before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hetconv.autotune.launch.progress import Reporter
from hetconv.autotune.launch.throttle import DeviceName
from hetconv.autotune.measure import timer
from hetconv.autotune.measure.device_info import conditions
from hetconv.autotune.measure.model_inputs import InputSpec, ModelInputs
from hetconv.autotune.measure.models import build_model, channels_last
from hetconv.comm.rank_group import rank_group_of
from hetconv.errors import HetConvError
from hetconv.schemas.cluster_profile import ClusterProfile
from hetconv.schemas.json_files import adapter
from hetconv.schemas.plan import Mode
from hetconv.tracing.graph import Graph
from hetconv.tracing.tracer import capture

from .journal import Store, claimed
from .race import Race

T = TypeVar("T")
STAGES = "stages"  # under which the store has the profile after each
LIMIT = 60.0  # seconds, the least that a rank waits for another within a trial


@dataclass(frozen=True)
class Job:
    """What `hetconv autotune` was asked for. ``budget`` in seconds.

    ``resume``: what an interrupted run of the same job measured is not measured again.
    ``storage``: the URL of a database for the studies' trials, in place of a file
    beside the profile. ``quiet``: nothing is said but errors.
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


class Run:
    """One rank's side of a job that is under way. Making it is collective; rank 0 has
    the ``store``.
    """

    def __init__(self, job: Job, say: Reporter, stack: ExitStack):
        self.job, self.say, self.start, self.group = (
            job,
            say,
            time.monotonic(),
            rank_group_of(),
        )
        self.name = job.devices[self.group.rank]
        self.device = torch.device(self.name.device)
        model = (
            build_model(job.model, job.model_args, job.seed)
            .to(self.device)
            .train(job.mode == "train")
        )
        self.model: nn.Module
        self.inputs: ModelInputs
        self.model, self.inputs = channels_last(
            model, job.inputs.make(job.seed).to(self.device)
        )
        with torch.set_grad_enabled(job.mode == "train"):
            self.graph: Graph = capture(
                self.model, *self.inputs.args, **self.inputs.kwargs
            )
        self.race = Race(self.model, self.inputs, job.mode, max(LIMIT, job.budget / 4))
        self.on_gpu = any(torch.device(d.device).type == "cuda" for d in job.devices)
        self.store, refused = (
            self._opened(stack) if self.group.rank == 0 else (None, None)
        )
        refused, self._known = timer.told(
            (refused, self.store.known if self.store is not None else {})
        )
        if refused is not None:
            raise HetConvError(refused)

    def _opened(self, stack: ExitStack) -> tuple[Store | None, str | None]:
        """The store, claimed; or why it is not, so that all ranks can say so."""
        job, now = self.job, conditions(self.device)
        asked = {
            "model": f"{job.model} {job.model_args}",
            "graph": self.graph.digest,
            "inputs": str(job.inputs),
            "mode": job.mode,
            "devices": [str(d) for d in job.devices],
            "seed": job.seed,
            "torch": now.torch,
            "triton": now.triton,
        }
        try:
            folder = stack.enter_context(claimed(job.output))
            return Store(folder, asked, resume=job.resume, url=job.storage), None
        except HetConvError as e:
            return None, str(e)

    def passed(self, part: float) -> Callable[[], bool]:
        """Whether this part of the budget is spent."""
        return lambda: self.spent > part

    @property
    def spent(self) -> float:
        """What part of the budget is."""
        return self.seconds / self.job.budget

    @property
    def seconds(self) -> float:
        """Since this job began."""
        return time.monotonic() - self.start

    def known(self, stage: str, key: str, type_: type[T]) -> T | None:
        """What was kept, if it was."""
        found = self._known.get((stage, key))
        return adapter(type_).validate_python(found) if found is not None else None

    def keep(self, stage: str, key: str, value: Any) -> None:
        """On rank 0's disk when this returns there."""
        if self.store is not None:
            self.store.keep(
                stage, key, adapter(type(value)).dump_python(value, mode="json")
            )

    def finished(self, stage: str) -> ClusterProfile | None:
        """The profile after a stage that was finished with no less effort than this job's."""
        found = self._known.get((STAGES, stage))
        if (
            found is None
            or found["budget"] < self.job.budget
            or found["trials"] < self.job.trials
        ):
            return None
        return adapter(ClusterProfile).validate_python(found["profile"])

    def finish(self, stage: str, profile: ClusterProfile) -> ClusterProfile:
        """Rank 0's profile, on every rank; written, whole, to where the job wants it,
        and to the store.
        """
        profile = timer.told(profile)
        if self.store is not None:
            profile.save(self.job.output)
            document = adapter(ClusterProfile).dump_python(profile, mode="json")
            effort = {"budget": self.job.budget, "trials": self.job.trials}
            self.store.keep(STAGES, stage, effort | {"profile": document})
        return profile

    def led(self, lead: Callable[[], T]) -> T:
        """What ``lead`` gives on rank 0, on every rank; the others follow its races meanwhile."""
        found = None
        if self.group.rank == 0:
            found = lead()
            self.race.end()
        else:
            self.race.follow()
        said: T = timer.told(found)
        return said
