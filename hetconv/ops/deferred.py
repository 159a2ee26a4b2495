"""A convolution that waits for what follows it: what can be done as its sums are stored is folded into it.

Only without autograd, and only for the functions that a plan lists as its sole followers. Anything else that is done to
the result has it computed first, as it stands, so that the listing is a hint and never decides what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hetconv import kernels
from hetconv.comm.rank_group import Switch, Team, objects_of_all
from hetconv.errors import HetConvError
from hetconv.runtime.gradient_sync import SCOPE
from hetconv.runtime.het_tensor import HetTensor
from hetconv.sharding.layout import Layout
from hetconv.torch_internals import write_count

from .chunks import gathered_in_chunks
from .geometry import Geometry
from .halo_exchange import NOTHING, After, computed

fold_anywhere = Switch()
"""What is parallelized meanwhile folds also where that does not pay."""


class Waiting(NamedTuple):
    """This rank's part of a convolution, put off, with what was folded into it so far. A call computes it.

    ``expects``: what may be folded next, in order. ``chunks`` of the batch in which it is gathered, where the whole is
    asked for. ``seen``: tensors that are read then, at their versions of now.
    """

    x: Tensor
    w: Tensor
    b: Tensor | None
    geo: Geometry
    layout: Layout
    team: Team
    expects: tuple[str, ...]
    chunks: int = 1
    after: After = NOTHING
    seen: tuple[tuple[Tensor, int], ...] = ()

    def with_residual(self, residual: Tensor) -> Waiting:
        after = self.after._replace(residual=residual)
        return self._replace(after=after, seen=self.seen + version(residual))

    def __call__(self) -> Tensor:
        with self._reading():
            return computed(self.x, self.w, self.b, self.geo, self.team, self.after)[0]

    def gathered(self) -> Tensor | None:
        if min(self.chunks, self.layout.shape[0]) < 2 or self.layout.dim != 1:
            return None
        with self._reading():
            return gathered_in_chunks(self.x, self.w, self.b, self.geo, self.team, self.after, self.layout, self.chunks)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if any(write_count(t) != version for t, version in self.seen):
            raise HetConvError(
                "the input of a convolution was written to in place before what follows the convolution was called; "
                "write to a copy, or call parallelize without fuse=True"
            )
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            yield


def version(t: Tensor) -> tuple[tuple[Tensor, int], ...]:
    """An entry of `Waiting.seen`; an inference tensor keeps no count."""
    return () if t.is_inference() else ((t, write_count(t)),)


def folding_pays(team: Team) -> bool:
    """Whether a model folds on these ranks; alike on all of them, for when halos travel goes by it. Collective.

    Only where Triton computes convolutions. ATen does what is folded in passes of its own, and Python takes longer to
    fold it than the one pass takes that is saved: on an H100 with cuDNN 2.6 times as long as without.
    """
    return any(objects_of_all(team, fold_anywhere.on or not kernels.only_aten()))


def may_wait(x: Tensor) -> bool:
    """Within a parallelized model's forward, without autograd, and not where writes to ``x`` would go unnoticed."""
    if torch.is_grad_enabled() or SCOPE.get() is None:
        return False
    if isinstance(x, HetTensor):
        return x.placement.kind != "replicated" or not x.local.is_inference()
    return not x.is_inference()
