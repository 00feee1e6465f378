"""The metadata of a save, gathered on rank 0: chunks and parameters, of which it makes the index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_etp.checkpoint.chunks import LogicalTensor, Shape
from ds_etp.checkpoint.folder import FileNames
from ds_etp.checkpoint.format import WEIGHT, Index, StoredChunk, StoredTensor
from ds_etp.checkpoint.pipeline_stages import union_over_stages
from ds_etp.checkpoint.save_plan import TensorMetadata, WrittenChunks
from ds_etp.checkpoint.states import EngineStates, hyperparameters
from ds_etp.errors import CheckpointError


@dataclass(frozen=True)
class ParamMetadata:
    """What the ranks of a pipeline stage know alike of one parameter.

    Attributes:
        shape: unsharded.
        frozen: whether it isn't trained.
        optimizer: its hyperparameters and scalar states; None where no optimizer steps it.
    """

    shape: Shape
    frozen: bool
    optimizer: tuple[dict[str, Any], dict[str, float]] | None


# Of one pipeline stage, or of all: by name, in the model's order.
StageMetadata = dict[str, ParamMetadata]


def stage_metadata(tensors: list[LogicalTensor], states: EngineStates) -> StageMetadata:
    """That of this rank's pipeline stage."""
    found = {}
    for tensor in tensors:
        stepped, optimizer = states.param_state(tensor.parameter).optimizer_tensor, None
        if states.optimizer_class is not None and stepped is not None:
            optimizer = hyperparameters(stepped.group), stepped.scalars()
        found[tensor.name] = ParamMetadata(tensor.shape, not tensor.parameter.requires_grad, optimizer)
    return found


def gather_metadata(
    chunks: WrittenChunks, own: StageMetadata | None, first_ranks: tuple[int, ...]
) -> tuple[list[WrittenChunks], StageMetadata]:
    """On rank 0, what each rank writes and the parameters of all pipeline stages; elsewhere nothing.

    Collective over the world.

    Args:
        chunks: that this rank is to write.
        own: of this rank's pipeline stage, on its first rank.
        first_ranks: the first rank of each pipeline stage.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    answers: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object((chunks, own), answers, dst=0)
    if answers is None:
        return [], {}
    return [written for written, _ in answers], union_over_stages(answers[first][1] for first in first_ranks)


def make_index(
    saved: list[TensorMetadata],
    by_rank: list[WrittenChunks],
    parameters: StageMetadata,
    optimizer_class: str | None,
    names: FileNames,
) -> Index:
    """The index of a save, without its files' sizes and hashes, which are known once they are written.

    Raises:
        CheckpointError: the chunks don't cover the whole model.
    """
    chunks: dict[str, list[StoredChunk]] = {metadata.key: [] for metadata in saved}
    for writer, written in enumerate(by_rank):
        for key, number, chunk in written:
            chunks[key].append(StoredChunk(chunk, names.data(writer).name, f"{key}#{number}"))
    tensors = {key: StoredTensor(dtype, shape, tuple(chunks[key])) for key, shape, dtype in saved}
    shapes = {name: metadata.shape for name, metadata in parameters.items()}
    excluded = [name for name in shapes if f"{WEIGHT}/{name}" not in tensors]
    extra = {"frozen": [name for name, metadata in parameters.items() if metadata.frozen], "excluded": excluded}
    optimizer = None if optimizer_class is None else _optimizer_index(optimizer_class, parameters)
    index = Index(tensors, {}, shapes, optimizer, {}, {}, extra)
    error = index.coverage_error()
    if error:
        raise CheckpointError(f"the chunks that ranks hold do not cover the whole model: {error}")
    return index


def _optimizer_index(optimizer_class: str, parameters: StageMetadata) -> dict[str, Any]:
    """The index's entry of the optimizer, with parameters of equal hyperparameters in one group."""
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    scalars: dict[str, dict[str, float]] = {}
    for name, metadata in parameters.items():
        if metadata.optimizer is None:
            continue
        own, scalars[name] = metadata.optimizer
        if own not in groups:
            groups.append(own)
        group_of[name] = groups.index(own)
    return {"class": optimizer_class, "groups": groups, "group_of": group_of, "scalars": scalars}
