"""The files of a checkpoint that plain DeepSpeed wrote at ZeRO 1 to 3 (0.19.5 to 0.19.8), opened without its code.

    <tag>/mp_rank_00_model_states.pt                          ZeRO 1, 2: weights, buffers, counters, client state
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt         ZeRO 3: the same; frozen weights in parts, weights not
    <tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt  rank r's partitions of master weights and states

They are pickles. `torch.load(weights_only=True)` reads them with stand-ins for the four classes that DeepSpeed puts
there, so that no code from the files runs; tensors are mapped, and read when they are needed.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_etp.errors import CheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*_optim_states\.pt")
_PIPELINE_FILE = re.compile(r"layer_\d+-.*model_states\.pt")
_AUTOEP = ("ds_autoep_layers", "autoep_layers")


class _LossScaler:
    """Stand-in: a bag of the scaler's numbers."""


class _DynamicLossScaler(_LossScaler):
    """Stand-in."""


class _LossScaleConfig(_LossScaler):
    """Stand-in."""


class _FragmentAddress:
    """Stand-in: where a parameter lies in a partition; we compute that."""


# What DeepSpeed's files hold beside tensors and plain values, by its name there.
_STAND_INS: list[Any] = [
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_LossScaleConfig, "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig"),
    (_FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class DeepSpeedFiles:
    """An opened checkpoint of plain DeepSpeed.

    Attributes:
        folder: the tag's.
        stage: ZeRO's: 1, 2 or 3.
        models: contents of the files of model states: rank 0's, or at ZeRO-3 every rank's.
        optimizers: by rank, what its ZeRO optimizer saved.
    """

    folder: Path
    stage: int
    models: tuple[dict[str, Any], ...]
    optimizers: tuple[dict[str, Any], ...]

    @property
    def world(self) -> int:
        """The data-parallel size."""
        return len(self.optimizers)

    @property
    def config(self) -> Mapping[str, Any]:
        """The DeepSpeed config of the run that wrote it."""
        config = self.models[0].get("ds_config")
        return config if isinstance(config, Mapping) else {}


def open_deepspeed(folder: Path, *, trust_pickle: bool = False) -> DeepSpeedFiles:
    """Opens a tag's folder.

    Args:
        folder: the tag's.
        trust_pickle: lets files with objects of other classes run their code.

    Raises:
        CheckpointError: it isn't a complete checkpoint of plain data parallelism at ZeRO 1 to 3; the message says why.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder, so there is no checkpoint in it")
    names = sorted(entry.name for entry in folder.iterdir())
    _refuse_split_models(folder, names)
    ranks = sorted(int(match.group(1)) for name in names if (match := _OPTIMIZER_FILE.fullmatch(name)))
    if not ranks:
        raise CheckpointError(
            f"{folder} has no *_optim_states.pt: it isn't DeepSpeed's at ZeRO 1 to 3. Load one of ZeRO 0 in a script "
            "without the expert_tensor_parallel block, and save it there with ds_etp.save_checkpoint(engine, dir)."
        )
    by_rank = {int(match.group(1)): name for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))}
    if len(by_rank) != len(ranks):
        raise CheckpointError(f"{folder} has optimizer states of bf16 and of other runs: a save went over another's")
    optimizers = tuple(
        _load(folder / by_rank[rank], trust_pickle).get("optimizer_state_dict") or {} for rank in sorted(by_rank)
    )
    # BF16_Optimizer, which is ZeRO 1, doesn't say.
    stage = int(optimizers[0].get("zero_stage", 1))
    count = optimizers[0].get("partition_count")
    counts = set(count) if isinstance(count, list | tuple) else {count}
    if counts != {len(ranks)} or ranks != list(range(len(ranks))):
        raise CheckpointError(
            f"{folder} has optimizer states of ranks {ranks}; they were split over {sorted(map(str, counts))} ranks: a "
            "rank's file is missing, is left over from a larger run, or experts have data-parallel groups of their own"
        )
    paths = [folder / "mp_rank_00_model_states.pt"]
    if stage == 3:
        paths = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]
    files = DeepSpeedFiles(folder, stage, tuple(_load(path, trust_pickle) for path in paths), optimizers)
    _refuse_options(files)
    return files


def _load(path: Path, trust_pickle: bool) -> dict[str, Any]:
    try:
        mapped = zipfile.is_zipfile(path)  # what older or other writers made can't be mapped
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=not trust_pickle)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
        raise CheckpointError(
            f"{path} holds {found.group(1)}, which only running code from the file could restore. If you trust whoever "
            "wrote it, pass --trust-pickle (trust_pickle=True)."
        ) from error
    except (OSError, RuntimeError, EOFError, ImportError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged or can't be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(content).__name__}, not a dict")
    return content


def _refuse_split_models(folder: Path, names: list[str]) -> None:
    if "index.json" in names and not any(_OPTIMIZER_FILE.fullmatch(name) for name in names):
        raise CheckpointError(f"{folder} is in ds_etp's format: load_checkpoint reads it, there is nothing to import")
    way = "Only plain data parallelism can be imported."
    for pattern, what in ((_EXPERT_FILE, "experts apart (expert parallelism)"), (_PIPELINE_FILE, "pipeline layers")):
        if found := [name for name in names if pattern.fullmatch(name)]:
            raise CheckpointError(f"{folder} holds {what}, such as {found[0]}. {way}")
    if split := [name for name in names if re.search(r"mp_rank_(?!00)\d+_", name)]:
        raise CheckpointError(f"{folder} was written with tensor or pipeline parallelism: it has {split[0]}. {way}")


def _refuse_options(files: DeepSpeedFiles) -> None:
    model, optimizer = files.models[0], files.optimizers[0]
    dims = model.get("checkpoint_parallel_dimensions") or {}
    zero = files.config.get("zero_optimization") or {}
    reasons = {
        "tensor parallelism": model.get("mp_world_size", 1) != 1 or (dims.get("tp_degree") or 1) != 1,
        "pipeline parallelism": (dims.get("pp_degree") or 1) != 1,
        "AutoEP": any(model.get(key) for key in _AUTOEP) or "ds_zero_partition_groups" in optimizer,
        "MiCS": (zero.get("mics_shard_size") or -1) > 0,
        "elastic_checkpoint, which drops hyperparameters": isinstance(optimizer.get("base_optimizer_state"), list),
        "no list of parameters": not model.get("param_shapes"),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise CheckpointError(
            f"{files.folder} was written with {found[0]}: only plain data parallelism at ZeRO 1 to 3 can be imported"
        )
