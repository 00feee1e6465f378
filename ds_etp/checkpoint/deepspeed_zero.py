"""Where ZeRO has put each parameter: from flat partitions of ranks back to whole tensors, one at a time.

ZeRO 1 and 2 flatten an optimizer group's parameters one after another, with a little padding between some, and cut
the whole into one partition a rank. ZeRO 3 cuts each parameter into equal parts, the last ones padded, and flattens
a rank's parts of a group. Both are pieces here: stretches of partitions that are a parameter's entries in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ds_etp.checkpoint.chunks import Shape
from ds_etp.checkpoint.deepspeed_files import DeepSpeedFiles
from ds_etp.checkpoint.format import WEIGHT
from ds_etp.checkpoint.states import hyperparameters, split_state
from ds_etp.errors import CheckpointError


@dataclass(frozen=True)
class Partition:
    """One rank's part of a flat group.

    Attributes:
        tensors: by state name, flat; `fp32` may lack the padding that the others have.
        scalars: the states that are one number.
        hyperparameters: those of its optimizer group.
    """

    tensors: dict[str, Tensor]
    scalars: dict[str, float]
    hyperparameters: dict[str, Any]

    @property
    def numel(self) -> int:
        """Entries, without padding where the files have dropped it."""
        return self.tensors[WEIGHT].numel()


@dataclass(frozen=True)
class PartitionSlice:
    """`numel` entries of a partition from `start` on."""

    partition: Partition
    start: int
    numel: int


@dataclass(frozen=True)
class ZeroParameter:
    """A parameter that the optimizer steps.

    Attributes:
        name, shape: as in the model.
        partition: rank 0's of its group: it tells states, scalars and hyperparameters.
        pieces: its entries, in order.
    """

    name: str
    shape: Shape
    partition: Partition
    pieces: tuple[PartitionSlice, ...]

    def read(self, state_name: str) -> Tensor:
        """One of its states, whole."""
        parts = [piece.partition.tensors[state_name].narrow(0, piece.start, piece.numel) for piece in self.pieces]
        return torch.cat(parts).view(self.shape)


def zero_parameters(files: DeepSpeedFiles) -> Iterator[ZeroParameter]:
    """Every parameter that the optimizer steps, in the order in which ZeRO flattened them.

    Raises:
        CheckpointError: the partitions are not of the lengths that the parameters' shapes give.
    """
    groups: list[dict[str, Any]] = files.models[0]["param_shapes"]
    by_rank = [_partitions(files, rank) for rank in range(files.world)]
    lengths = {len(partitions) for partitions in by_rank}
    if lengths != {len(groups)}:
        raise CheckpointError(f"{files.folder}: {len(groups)} parameter groups, partitions of {sorted(lengths)}")
    for number, shapes in enumerate(groups):
        partitions = [own[number] for own in by_rank]
        names = set(partitions[0].tensors)
        if any(set(partition.tensors) != names for partition in partitions):
            raise CheckpointError(f"{files.folder}: ranks hold different optimizer states of parameter group {number}")
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        cut = _stage_3 if files.stage == 3 else _stage_1_and_2
        yield from cut(files, number, sizes, partitions)


def _partitions(files: DeepSpeedFiles, rank: int) -> list[Partition]:
    saved = files.optimizers[rank]
    weights = saved["fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"]
    base = saved["optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"]
    # One flat tensor is one of the base optimizer's parameters; ZeRO-3 may have several in a group.
    groups = [group for group in base["param_groups"] for _ in group["params"]]
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    if len(numbers) != len(weights):
        raise CheckpointError(f"{files.folder}: rank {rank} has {len(weights)} partitions, {len(numbers)} states")
    partitions = []
    for number, group, weight in zip(numbers, groups, weights, strict=True):
        state = base["state"].get(number) or {}
        # Padded, as the optimizer stepped it, where the weight may be without.
        numel = max((v.numel() for v in state.values() if isinstance(v, Tensor)), default=weight.numel())
        where = f"rank {rank}'s partition {number}"
        tensors, scalars = split_state(where, torch.empty(max(numel, weight.numel()), device="meta"), state)
        if state and "step" in group:
            scalars = {"step": group["step"], **scalars}  # FusedAdam has had it there
        partitions.append(Partition({WEIGHT: weight, **tensors}, scalars, hyperparameters(group)))
    return partitions


def _stage_1_and_2(
    files: DeepSpeedFiles, number: int, shapes: dict[str, Shape], partitions: list[Partition]
) -> Iterator[ZeroParameter]:
    given = files.optimizers[0].get("param_alignment_paddings")
    paddings = given[number] if given else [0] * len(shapes)
    # Only after the last entry do partitions lack something, so that what there is follows on without a gap.
    starts = [sum(partition.numel for partition in partitions[:rank]) for rank in range(len(partitions) + 1)]
    first = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        last = first + prod(shape)
        pieces = []
        for partition, start in zip(partitions, starts, strict=False):
            begin, end = max(first, start), min(last, start + partition.numel)
            if begin < end:
                pieces.append(PartitionSlice(partition, begin - start, end - begin))
        yield ZeroParameter(name, shape, partitions[0], tuple(pieces))
        first = last + padding
    # BF16_Optimizer leaves the padding at the end, which aligns the whole to a few entries a rank.
    if not first <= starts[-1] < first + 64 * len(partitions):
        raise _other_length(files, number, first, starts[-1])


def _stage_3(
    files: DeepSpeedFiles, number: int, shapes: dict[str, Shape], partitions: list[Partition]
) -> Iterator[ZeroParameter]:
    start = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        part = -(-numel // len(partitions))
        pieces = [
            PartitionSlice(partition, start, min(part, numel - rank * part))
            for rank, partition in enumerate(partitions)
            if rank * part < numel
        ]
        yield ZeroParameter(name, shape, partitions[0], tuple(pieces))
        start += part
    for partition in partitions:
        if partition.numel != start:
            raise _other_length(files, number, start, partition.numel)


def _other_length(files: DeepSpeedFiles, number: int, expected: int, found: int) -> CheckpointError:
    return CheckpointError(
        f"{files.folder}: parameter group {number} has {found} entries, its parameters' shapes give {expected}. The "
        "file is damaged, states were kept elsewhere (on NVMe), or this DeepSpeed lays them out in another way."
    )
