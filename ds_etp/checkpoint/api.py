"""`engine.save_checkpoint` and `engine.load_checkpoint` in ds_etp's format, on one engine.

DeepSpeed's own (0.19.5 to 0.19.8) write one rank's experts, under names that collide, return True, and load
with no complaint; training goes on with wrong weights. Signatures, flags and return values are theirs. Can go
when DeepSpeed's checkpoints know of expert tensor parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

from ds_etp.checkpoint.async_save import PendingSave, pending_saves, wait
from ds_etp.checkpoint.export import tied_names
from ds_etp.checkpoint.format import INDEX, LATEST, own_version
from ds_etp.checkpoint.load import LoadRequest, load
from ds_etp.checkpoint.save import SaveRequest, save
from ds_etp.errors import CheckpointError
from ds_etp.log import logger
from ds_etp.parallel.consensus import broadcast_object, raise_on_all_ranks
from ds_etp.parallel.topology import Topology
from ds_etp.patches.deepspeed.optimizer_states import states_of
from ds_etp.patches.deepspeed.pipeline import topology_of
from ds_etp.patches.deepspeed.ulysses import deepspeed_sequence_size

# The engine's attribute with the asynchronous save that nobody has waited for.
_PENDING = "ds_etp_pending_save"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def save_checkpoint(
    engine: Any,
    save_dir: str,
    tag: Any = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Saves a checkpoint that any layout of the model can load. Collective over the world.

    Also for an engine without the `expert_tensor_parallel` block: that is the way of a run that began
    without it to another layout.

    With `"async_save": true` in the block it returns once this rank's part is copied to the host's memory, and a thread
    writes it. The tag is there when every rank's file is durable. The next save or load of the engine, `wait_for_save`,
    `engine.destroy` and the end of the process wait for that, and raise what went wrong.

    Args:
        engine: a DeepSpeed engine.
        save_dir: the directory that holds the tags.
        tag: `global_step<n>` where None; the same on all ranks.
        client_state: plain values and tensors; rank 0's are saved.
        save_latest: whether the file `latest` is to name this tag.
        exclude_frozen_parameters: leaves out parameters that aren't trained.

    Returns:
        True.

    Raises:
        CheckpointError: on every rank, with the reason; the last complete checkpoint stays what it was. If it is about
            an asynchronous save before this one, this one hasn't begun.
    """
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    wait_for_save(engine)
    topology = _topology(engine)
    _warn_of_partial_step(engine)
    request = SaveRequest(
        directory=Path(save_dir),
        tag=f"global_step{engine.global_steps}" if tag is None else str(tag),
        engine={name: int(getattr(engine, name)) for name in _COUNTERS},
        state={"client_state": dict(client_state or {}), **_helpers(engine, lambda helper: helper.state_dict())},
        layout=_layout(engine, topology),
        extra=_model_metadata(engine),
        save_latest=save_latest,
        exclude_frozen=exclude_frozen_parameters,
        asynchronous="ds_etp" in vars(engine) and engine.ds_etp.block.async_save,
    )
    states = None
    with raise_on_all_ranks("saving a checkpoint"):
        states = states_of(engine)
        request.engine["loss_scale"] = states.loss_scale()
    assert states is not None
    pending = save(engine.module, states, topology, request)
    if pending is not None:
        setattr(engine, _PENDING, pending)
    return True


def wait_for_save(engine: Any) -> None:
    """Waits until the engine's last checkpoint is complete. Collective over the world; at once without `async_save`.

    Args:
        engine: a DeepSpeed engine.

    Raises:
        CheckpointError: on every rank: a rank could not write its part, for the reason it names. Raised once; the
            checkpoint before is still there.
    """
    pending = _taken(engine)
    if pending is not None:
        wait(pending)


def finish_save_alone(engine: Any) -> None:
    """The same without a collective, for the end of an engine, which ranks may come to at different times.

    Raises:
        CheckpointError: on every rank that calls it, from the reason that ranks have left in files.
    """
    pending = _taken(engine)
    if pending is not None:
        pending.join_committed()


def _taken(engine: Any) -> PendingSave | None:
    # Not getattr: an engine passes unknown names on to its module.
    pending: PendingSave | None = vars(engine).pop(_PENDING, None)
    return pending


def load_checkpoint(
    engine: Any,
    load_dir: str,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Loads a checkpoint that `save_checkpoint` wrote on any layout. Collective over the world.

    Args:
        engine: a DeepSpeed engine, with the `expert_tensor_parallel` block or without.
        load_dir: the directory that holds the tags.
        tag: the one that `latest` names where None.
        load_module_strict: refuses a checkpoint with other parameters than the model's.
        load_optimizer_states: moments, steps and hyperparameters too.
        load_lr_scheduler_states: the lr scheduler too.
        load_module_only: only the weights.
        custom_load_fn: not supported.

    Returns:
        The path of the checkpoint's index and the client state; (None, None), with a warning, where no tag is
        given and there is no `latest`.

    Raises:
        CheckpointError: on every rank; it names the file. Unless it says so, nothing was changed.
    """
    if custom_load_fn is not None:
        raise CheckpointError("custom_load_fn: ds_etp fills shards from files, there is no state dict to load from")
    wait_for_save(engine)
    for pending in pending_saves(Path(load_dir)):
        pending.join()  # of another engine: the checkpoint may be the one that is to be loaded
    if tag is None:
        tag = _latest_tag(Path(load_dir))
        if tag is None:
            return None, None
    topology = _topology(engine)
    optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    layout = _layout(engine, topology)
    request = LoadRequest(Path(load_dir) / str(tag), strict=load_module_strict, optimizer=optimizer, layout=layout)
    states = None
    with raise_on_all_ranks("loading a checkpoint"):
        states = states_of(engine)
    assert states is not None
    index, state = load(engine.module, states, topology, request)
    if not load_module_only:
        if optimizer:
            states.set_loss_scale(index.engine["loss_scale"])
        _restore_engine(engine, index.engine, index.layout, state, load_lr_scheduler_states)
    return str(request.folder / INDEX), state["client_state"]


def _latest_tag(directory: Path) -> str | None:
    """The tag that rank 0 finds in `latest`; None, with a warning, where there is none."""
    path, tag = directory / LATEST, None
    with raise_on_all_ranks(f"loading the latest checkpoint of {directory}"):
        if dist.get_rank() == 0 and path.is_file():
            tag = path.read_text().strip()
    tag = broadcast_object(tag)
    if tag is None and dist.get_rank() == 0:
        logger().warning(
            "Unable to find latest file at %s, if trying to load latest checkpoint please ensure this file exists "
            "or pass an explicit checkpoint tag when loading a checkpoint.",
            path,
        )
    return tag


def _topology(engine: Any) -> Topology:
    if "ds_etp" not in vars(engine) and deepspeed_sequence_size() > 1:
        raise CheckpointError("ds_etp saves and loads engines with data, tensor and pipeline parallelism only")
    return topology_of(engine)


def _layout(engine: Any, topology: Topology) -> dict[str, Any]:
    sizes = {name: getattr(topology, name) for name in ("world", "tp", "pp", "etp", "ep")}
    dtype = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    return {**sizes, "ZeRO stage": int(engine.zero_optimization_stage()), "dtype": dtype}


def _warn_of_partial_step(engine: Any) -> None:
    if engine.micro_steps % engine.gradient_accumulation_steps() and dist.get_rank() == 0:
        logger().warning(
            "saving in the middle of gradient accumulation (%d of %d micro batches): gradients are not saved, "
            "a resumed run begins this step anew",
            engine.micro_steps % engine.gradient_accumulation_steps(),
            engine.gradient_accumulation_steps(),
        )


def _model_metadata(engine: Any) -> dict[str, Any]:
    """Metadata of the model for readers without the engine: its class, tied names and config, which an export needs."""
    module = engine.module
    metadata: dict[str, Any] = {
        "ds_etp": own_version(),
        "deepspeed": deepspeed.__version__,
        "model_class": type(module).__name__,
        "tied": tied_names(module),
    }
    for name in ("hf_config", "hf_generation_config"):
        # A pipeline has them under these names, a model of transformers under its own.
        config: Any = getattr(module, name, None) or getattr(module, name.removeprefix("hf_"), None)
        if hasattr(config, "to_json_string"):
            metadata[name] = json.loads(config.to_json_string())
    if metadata.get("hf_config", {}).get("architectures") and engine.pipeline_parallelism:
        metadata["model_class"] = metadata["hf_config"]["architectures"][0]
    return metadata


def _helpers(engine: Any, use: Callable[[Any], Any]) -> dict[str, Any]:
    """The engine's stateful helpers, those it has, put through `use`."""
    found = {"lr_scheduler": engine.lr_scheduler}
    if engine.random_ltd_enabled():
        found["random_ltd"] = engine.random_ltd_scheduler
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    return {name: use(helper) for name, helper in found.items() if helper is not None}


def _restore_engine(
    engine: Any, counters: dict[str, Any], layout: dict[str, Any], state: dict[str, Any], lr_scheduler: bool
) -> None:
    for name, helper in _helpers(engine, lambda helper: helper).items():
        if name in state and (lr_scheduler or name != "lr_scheduler"):
            helper.load_state_dict(state[name])
    engine.global_steps = counters["global_steps"]
    engine.global_samples = counters["global_samples"]
    engine.skipped_steps = counters["skipped_steps"]
    # Where accumulation stands follows from this count; gradients begin anew, and the factor may be another.
    engine.micro_steps = counters["global_steps"] * engine.gradient_accumulation_steps()
    engine.loaded_checkpoint_mp_world_size = layout["tp"]
    engine.loaded_checkpoint_dp_world_size = layout["world"] // layout["tp"] // layout.get("pp", 1)
