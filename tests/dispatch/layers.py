"""One MoE layer without a model: process groups, tokens, and experts that are one matrix each.

Everything here runs in worker processes. A whole case takes a fraction of a second, so that many layouts,
dispatchers and batches can be gone through in one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.utils import groups as host
from torch import Tensor

from ds_etp.dispatch.base import TokenDispatcher
from ds_etp.parallel.process_groups import ExpertGroups
from ds_etp.parallel.topology import Topology


@contextmanager
def expert_groups(topology: Topology) -> Iterator[ExpertGroups]:
    """The groups an engine would make."""
    if topology.tp > 1:
        host._init_tp_mesh_device(tensor_model_parallel_size=topology.tp)
    groups = ExpertGroups(topology)
    yield groups
    groups.destroy()


@dataclass
class Tokens:
    """A batch of one data-parallel rank, alike on its tensor-parallel peers."""

    x: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Tokens and weights of their own, to take gradients of."""
        return self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()


def make_tokens(count: int, per_token: int, experts: int, seed: int, *, hidden: int = 6) -> Tokens:
    """Random tokens, uniformly routed to `per_token` different experts each."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(count, hidden, generator=generator, dtype=torch.float64) for _ in range(2))
    index = torch.rand(count, experts, generator=generator).argsort(1)[:, :per_token]
    weights = torch.rand(count, per_token, generator=generator, dtype=torch.float64)
    return Tokens(x, index, weights, grad)


def make_experts(experts: int, etp: int, hidden: int = 6) -> Tensor:
    """Matrices `[E, etp, H, H]`: an expert is the sum of its etp parts, as it is of its slices."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(experts, etp, hidden, hidden, generator=generator, dtype=torch.float64)


def apply_experts(matrices: Tensor, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of a token's experts, `matrices` `[E, H, H]`."""
    products = torch.einsum("nkhi,ni->nkh", matrices[index], x)
    return (products * weights[..., None]).sum(1)


def run_plan(dispatcher: TokenDispatcher, matrices: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """A layer under a dispatcher: its output, and the gradients of tokens and weights."""
    groups = dispatcher.groups
    x, weights = tokens.leaves()
    rows = dispatcher.dispatch(x, tokens.index, weights)
    first = groups.ep.index * dispatcher.local_experts
    local = matrices[first : first + dispatcher.local_experts, groups.expt_tp.index]
    y = dispatcher.combine(apply_experts(local, rows.x, rows.index, rows.weights), rows)
    y.backward(tokens.grad)
    assert x.grad is not None and weights.grad is not None
    return y.detach(), x.grad, weights.grad


def run_whole(matrices: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """The same in one process."""
    x, weights = tokens.leaves()
    y = apply_experts(matrices.sum(1), x, tokens.index, weights)
    y.backward(tokens.grad)
    assert x.grad is not None and weights.grad is not None
    return y.detach(), x.grad, weights.grad


def data_rank(topology: Topology) -> int:
    """Which batch this process has."""
    return dist.get_rank() // topology.tp
