"""What rank 0 is told at the end of a save, and the index it makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_etp.checkpoint.chunks import Chunk, LogicalTensor, Shape
from ds_etp.checkpoint.format import WEIGHT, Index, StoredBox, StoredTensor
from ds_etp.checkpoint.states import EngineStates, settings
from ds_etp.checkpoint.walk import TensorMetadata
from ds_etp.checkpoint.writer import FileFacts
from ds_etp.errors import CheckpointError


@dataclass(frozen=True)
class Written:
    """A rank's file, and the boxes in it: key of the tensor, number of the box, the box."""

    file: FileFacts | None
    boxes: list[tuple[str, int, Chunk]]


@dataclass(frozen=True)
class StageMetadata:
    """What a stage's ranks know alike of its parameters.

    Attributes:
        shapes: unsharded, by name, in the model's order.
        frozen: names of those that aren't trained.
        stepped: by name of those in the optimizer, its hyperparameters and its single numbers.
    """

    shapes: dict[str, Shape]
    frozen: list[str]
    stepped: dict[str, tuple[dict[str, Any], dict[str, float]]]

    @classmethod
    def of(cls, tensors: list[LogicalTensor], states: EngineStates) -> StageMetadata:
        """This rank's."""
        stepped = {}
        for tensor in tensors:
            slot = states.place(tensor.parameter).slot
            if states.optimizer_class is not None and slot is not None:
                stepped[tensor.name] = settings(slot.group), slot.scalars()
        frozen = [tensor.name for tensor in tensors if not tensor.parameter.requires_grad]
        return cls({tensor.name: tensor.shape for tensor in tensors}, frozen, stepped)


def gathered(
    written: Written, own: StageMetadata | None, firsts: tuple[int, ...]
) -> tuple[list[Written], StageMetadata]:
    """On rank 0, what each rank wrote and what all stages hold; elsewhere nothing. Collective over the world.

    Args:
        written: by this rank.
        own: of this rank's stage, on its first rank.
        firsts: the first rank of each stage.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    answers: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object((written, own), answers, dst=0)
    union = StageMetadata({}, [], {})
    for first in firsts if answers else ():
        facts = answers[first][1]  # type: ignore[index]
        new = facts.shapes.keys() - union.shapes.keys()  # of what stages share, the first one's counts
        union.shapes.update({name: shape for name, shape in facts.shapes.items() if name in new})
        union.frozen.extend(name for name in facts.frozen if name in new)
        union.stepped.update({name: said for name, said in facts.stepped.items() if name in new})
    return [files for files, _ in answers or ()], union


def index_of(
    walk: list[TensorMetadata], by_rank: list[Written], facts: StageMetadata, optimizer_class: str | None
) -> Index:
    """The index of a save, its files without the suffix of their generation.

    Raises:
        CheckpointError: the boxes aren't the whole model.
    """
    boxes: dict[str, list[StoredBox]] = {key: [] for key, _, _ in walk}
    files = {}
    for writer, written in enumerate(by_rank):
        name = f"rank{writer:05d}"
        if written.file is not None:
            files[name] = written.file
        for key, number, box in written.boxes:
            boxes[key].append(StoredBox(box, name, f"{key}#{number}"))
    tensors = {key: StoredTensor(dtype, shape, tuple(boxes[key])) for key, shape, dtype in walk}
    excluded = [name for name in facts.shapes if f"{WEIGHT}/{name}" not in tensors]
    extra = {"frozen": facts.frozen, "excluded": excluded}
    optimizer = None if optimizer_class is None else _optimizer(optimizer_class, facts)
    index = Index(tensors, files, dict(facts.shapes), optimizer, {}, {}, extra)
    fault = index.fault()
    if fault:
        raise CheckpointError(f"the boxes the ranks hold are not the whole model: {fault}")
    return index


def _optimizer(optimizer_class: str, facts: StageMetadata) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    scalars: dict[str, dict[str, float]] = {}
    for name, (own, numbers) in facts.stepped.items():
        if own not in groups:
            groups.append(own)
        group_of[name] = groups.index(own)
        scalars[name] = numbers
    return {"class": optimizer_class, "groups": groups, "group_of": group_of, "scalars": scalars}
