"""Muon on matrices that are split over ranks (deepspeed 0.19.8).

Muon replaces a matrix's update by the nearest orthogonal matrix. DeepSpeed takes that of what a rank holds, at every
ZeRO stage: of the shard of a matrix that etp or AutoTP has split, which is no part of the whole one's. All of
its optimizers call one function, `muon_update`, with a parameter's gradient and momentum, and with two marks that
they read off the parameter (`is_expert_group`, `muon_num_heads`; some pass one, some the other). A split parameter
gets an object of ours for both marks, which says how whole matrices come together.

Can go when DeepSpeed's Muon knows of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from ds_etp.errors import config_error
from ds_etp.experts.layout import ParameterLayout, full_shape, join_chunks, take_chunks
from ds_etp.experts.sharded import Shard, sharded_modules
from ds_etp.parallel.collectives import all_gather_rows, all_reduce_in_place, all_to_all_rows, balanced_splits
from ds_etp.parallel.process_groups import ExpertGroups, ProcessGroupInfo
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.versions import check_muon_version

_ORIGINAL = "deepspeed.runtime.zero.muon.original_muon"
_WITH_ADAM = "deepspeed.runtime.zero.muon.muon_optimizer"
# Every caller takes `muon_update` from one of these.
_CALLERS = (_ORIGINAL, _WITH_ADAM)
_MARKS = ("is_expert_group", "muon_num_heads")
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"


class SplitMatrix:
    """How the whole matrices of one parameter come together. Collective over `peers`, which hold parts of them."""

    peers: ProcessGroupInfo

    def gather(self, shard: Tensor) -> Tensor:
        """The whole matrices that this rank orthogonalizes, perhaps none, from every rank's shard."""
        raise NotImplementedError

    def take(self, whole: Tensor) -> Tensor:
        """This rank's shard, from the orthogonalized matrices."""
        raise NotImplementedError

    def __reduce__(self) -> Any:
        # A parameter that is pickled takes its marks along, and process groups can't be pickled.
        return type(None), ()


@dataclass(frozen=True)
class _SplitExperts(SplitMatrix):
    """Experts `[E / ep, ., .]`, a matrix each. Every etp rank orthogonalizes its share of those of its ep rank."""

    layout: ParameterLayout
    shard: Shard
    peers: ProcessGroupInfo

    def gather(self, shard: Tensor) -> Tensor:
        experts = balanced_splits(len(shard), self.peers.size)
        own = experts[self.peers.index]
        (rows,) = all_to_all_rows([shard], experts, [own] * self.peers.size, self.peers)
        return self.layout.join_columns(rows.split(own) if own else [rows] * self.peers.size, self.shard.topology)

    def take(self, whole: Tensor) -> Tensor:
        experts = balanced_splits(self.layout.local_shape(self.shard.topology)[0], self.peers.size)
        topology = self.shard.topology
        columns = [self.layout.take_columns(whole, topology, index) for index in range(self.peers.size)]
        (rows,) = all_to_all_rows([torch.cat(columns)], [len(whole)] * self.peers.size, experts, self.peers)
        return rows


@dataclass(frozen=True)
class _SplitTable(SplitMatrix):
    """A bias `[E, I]` or `[E, H]` of the experts, which DeepSpeed takes for one matrix."""

    layout: ParameterLayout
    shard: Shard
    peers: ProcessGroupInfo  # etp is the fastest axis

    def gather(self, shard: Tensor) -> Tensor:
        etp = self.shard.topology.etp
        (rows,) = all_gather_rows([shard], [len(shard)] * self.peers.size, self.peers)
        shards = rows.split(len(shard))
        return self.layout.unshard([shards[first : first + etp] for first in range(0, len(shards), etp)])

    def take(self, whole: Tensor) -> Tensor:
        own = self.layout.shard(whole, self.shard.topology, self.shard.ep_index, self.shard.etp_index)
        # Of what all etp ranks hold whole, rank 0's is added, and counts in the norm.
        return own if self.layout.dim is not None or self.shard.etp_index == 0 else torch.zeros_like(own)


@dataclass(frozen=True)
class _SplitLayer(SplitMatrix):
    """A matrix that AutoTP has split: `widths[chunk][tp rank]` entries of `dim`."""

    dim: int
    widths: tuple[tuple[int, ...], ...]
    peers: ProcessGroupInfo

    def gather(self, shard: Tensor) -> Tensor:
        (rows,) = all_gather_rows([shard], [len(shard)] * self.peers.size, self.peers)
        return join_chunks(rows.split(len(shard)), self.dim, [list(shares) for shares in self.widths])

    def take(self, whole: Tensor) -> Tensor:
        return take_chunks(whole, self.dim, [list(shares) for shares in self.widths], self.peers.index)


def prepare_muon(model: nn.Module, groups: ExpertGroups, uses_muon: Callable[[Any], bool]) -> None:
    """Has DeepSpeed's Muon orthogonalize whole matrices, of the experts and of AutoTP's layers.

    Args:
        model: sharded; its parameters get marks.
        groups: those of its engine. Collective over the world, where no dispatcher was to use the one over `expt_tp`.
        uses_muon: whether Muon steps a parameter; Adam, which goes with it, steps the others as they are.

    Raises:
        ConfigError: another DeepSpeed, or a matrix is split in a way that can't be undone.
    """
    groups.require("expt_tp")
    found = list(_split_matrices(model, groups, uses_muon))
    if not found:
        return
    check_muon_version()
    for parameter, split in found:
        _mark(parameter, split)
    _install()


def _install() -> None:
    for name in _CALLERS:
        MethodPatch(import_module(name), "muon_update", _on_whole_matrices).apply()


def mark_masters(optimizer: Any) -> None:
    """FP16_UnfusedOptimizer (bf16 and fp16, stage 0) has Muon step fp32 copies of parameters: they get their marks."""
    for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            split = getattr(parameter, _MARKS[0], None)
            if isinstance(split, SplitMatrix):
                _mark(master, split)


def _mark(parameter: Tensor, split: SplitMatrix) -> None:
    for mark in _MARKS:
        setattr(parameter, mark, split)


def _split_matrices(
    model: nn.Module, groups: ExpertGroups, uses_muon: Callable[[Any], bool]
) -> Iterator[tuple[nn.Parameter, SplitMatrix]]:
    experts: set[int] = set()
    for _, module in sharded_modules(model):
        shard: Shard = module.ds_etp_shard
        for name, parameter in module.named_parameters():
            layout = shard.layout.parameters[name]
            experts.add(id(parameter))
            if not uses_muon(parameter):
                continue
            if len(layout.shape) == 2:
                if groups.expert_model_parallel.size > 1:
                    yield parameter, _SplitTable(layout, shard, groups.expert_model_parallel)
            elif layout.dim is not None and groups.expt_tp.size > 1:
                yield parameter, _SplitExperts(layout, shard, groups.expt_tp)
    if groups.tp.size == 1:
        return
    for name, parameter in model.named_parameters():
        # Whole heads, of which `per_head_muon` takes each by itself, are matrices that no one has split.
        whole_heads = getattr(parameter, "muon_num_heads", None) is not None
        if id(parameter) in experts or is_moe_param(parameter) or whole_heads:
            continue
        if uses_muon(parameter) and len(full_shape(parameter)) > 1:
            split = _autotp_split(name, parameter, groups.tp)
            if split is not None:
                yield parameter, split


def _autotp_split(name: str, parameter: nn.Parameter, tp: ProcessGroupInfo) -> _SplitLayer | None:
    """How AutoTP has split a matrix; None: it hasn't."""
    meta: Any = getattr(parameter, _AUTOTP_META, None) or {}
    dim: Any = meta.get("partition_dim")
    if dim is None and not getattr(parameter, "tensor_model_parallel", False):
        return None
    widths: Any = meta.get("sub_param_shard_widths") or [meta.get("partition_sizes")]
    held = full_shape(parameter)
    if (
        dim is None
        or None in widths
        or meta.get("unsupported_reason")
        or any(len(shares) != tp.size or len(set(shares)) > 1 for shares in widths)
        or sum(shares[tp.index] for shares in widths) != held[dim]
    ):
        # With shards of several sizes, ZeRO's partitions of ranks that have to work together begin and end elsewhere.
        raise config_error(
            "tensor_parallel.autotp_size",
            tp.size,
            "does not work with the Muon optimizer here: it needs whole matrices, and AutoTP has not split this one "
            "into equal shards that say how they fit together",
            where=name,
            works="1, sizes that divide the model's heads and widths, or another optimizer",
        )
    return _SplitLayer(dim, tuple(tuple(shares) for shares in widths), tp)


def _on_whole_matrices(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`muon_update`, which brings whole matrices together where a parameter's marks say how."""

    def muon_update(
        grad: Tensor,
        momentum: Tensor,
        beta: float = 0.95,
        ns_steps: int = 5,
        nesterov: bool = True,
        ns_method: str = "gram",
        is_expert_group: Any = False,
        num_heads: Any = None,
    ) -> Tensor:
        split = is_expert_group if isinstance(is_expert_group, SplitMatrix) else num_heads
        options: dict[str, Any] = {"ns_steps": ns_steps, "nesterov": nesterov, "ns_method": ns_method}
        if not isinstance(split, SplitMatrix):
            return original(grad, momentum, beta, is_expert_group=is_expert_group, num_heads=num_heads, **options)
        # The momentum and Nesterov's look ahead go entry by entry: only the result has to travel. A gradient that
        # overflowed, on any peer, stays out of the momentum and goes on, so that its step is skipped.
        overflowed = torch.isfinite(grad).all().logical_not().float()
        finite = all_reduce_in_place(overflowed, split.peers) == 0
        momentum.copy_(torch.where(finite, momentum.lerp(grad, 1 - beta), momentum))
        blend = grad.lerp(momentum, beta) if nesterov else torch.where(finite, momentum, grad)
        whole = split.gather(blend)
        if len(whole):
            # Blended with itself it stays what it is.
            whole = original(whole, whole.clone(), beta, **options)
        return split.take(whole).reshape(grad.shape)

    return muon_update
