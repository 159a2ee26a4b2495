"""How the first stage measures operators: once, again where disturbed, again where uncertain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetconv.autotune.measure import pace, timer
from hetconv.autotune.measure.layer_workloads import Workload
from hetconv.autotune.measure.pace import PaceChecks
from hetconv.autotune.measure.sampling import Passes
from hetconv.comm.rank_group import all_gather_object
from hetconv.schemas.provenance import Disturbance

from .job import Run, part_of

OPERATORS_PART = 0.4  # of the budget, by the end of this stage
MAX_REVISITS = 4  # of an operator whose medians have not converged


class OperatorSamples:
    """Measures operators while all ranks are at work on the same one. Collective.

    Args:
        run: the job, which keeps each operator.
        workloads: what to time, the largest first.
        checks: made between them.

    Attributes:
        samples: passes of this rank by key.
    """

    def __init__(self, run: Run, workloads: Sequence[Workload], checks: PaceChecks):
        self._run, self._workloads, self._checks = run, workloads, checks
        self._training = run.job.mode == "train"
        self._enough = run.passed(part_of(run, OPERATORS_PART))
        self._check_before: dict[str, int] = {}  # the check before each, by key
        self.samples: timer.Samples = {}

    def measure(self) -> None:
        """Measures all that an interrupted run has not, until the time is up."""
        run = self._run
        run.say.stage("operators", len(self._workloads))
        for workload in self._workloads:
            known = run.known("operators", workload.key, list[dict[float, Passes]])
            if known is not None:
                self.samples[workload.key] = known[run.group.rank]
                run.say.advance(f"{workload.label}, known")
        left = {w.key: w for w in self._workloads if w.key not in self.samples}
        self._checks.check()
        timings = timer.time_workloads(
            [*left.values()], run.device, self._enough, self._training
        )
        for key, passes in timings:
            self._keep(left[key], passes)

    def measure_disturbed(self) -> None:
        """Measures anew what was measured while something else used the devices."""
        disturbed = self._disturbed()
        again = [w for w in self._workloads if w.key in disturbed]
        if not again or self._has_enough():
            return
        self._run.say.stage("operators that were disturbed", len(again))
        for workload in again:
            if self._has_enough():
                return
            timing = timer.time_workloads(
                [workload], self._run.device, lambda: False, self._training
            )
            self._checks.check()
            for _, passes in timing:
                self._keep(workload, passes)

    def measure_uncertain(self) -> None:
        """Measures more of what may be most off in a step, until the time is up."""
        for _ in range(MAX_REVISITS):
            uncertain = timer.most_uncertain(
                self._workloads, self.samples, self._run.device, self._training
            )
            if not uncertain or self._has_enough():
                return
            self._run.say.stage("operators again", len(uncertain))
            for workload in uncertain:
                if self._has_enough():
                    return
                known = self.samples[workload.key]
                passes = timer.time_again(
                    workload, known, self._run.device, self._training
                )
                self._keep(workload, passes, checked=False)

    def disturbances(self) -> tuple[Disturbance, ...]:
        """Says how disturbed the samples are that count; nothing if they are not."""
        slower = max(self._disturbed().values(), default=1.0)
        return pace.disturbances("operators", slower)

    def _keep(
        self, workload: Workload, passes: dict[float, Passes], checked: bool = True
    ) -> None:
        self.samples[workload.key] = passes
        run = self._run
        run.keep("operators", workload.key, all_gather_object(run.group, passes))
        if checked:
            self._check_before[workload.key] = len(self._checks) - 1
            self._checks.check()
        run.say.advance(workload.label)

    def _disturbed(self) -> Mapping[str, float]:
        """By key, the slowdown around what was disturbed."""
        slowdowns = self._checks.slowdowns()
        around = {
            key: max(slowdowns[i : i + 2], default=1.0)
            for key, i in self._check_before.items()
        }
        return {
            key: slower for key, slower in around.items() if slower > pace.DISTURBED
        }

    def _has_enough(self) -> bool:
        """What rank 0 says, on every rank."""
        return bool(timer.broadcast_object(self._enough()))
