"""The engine extension: calls the floors below, in order, at the moments DeepSpeed gives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_etp.config import block as block_config
from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.config.deepspeed import half_dtype
from ds_etp.config.dense_rules import check_axes
from ds_etp.config.host_rules import check_host_options
from ds_etp.config.optimizers import check_client_optimizer
from ds_etp.dispatch.cost import DispatchChoice, tokens_are_replicated
from ds_etp.experts import build
from ds_etp.experts.checks import checked_layouts, choose_dispatchers, dispatcher_rows
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.experts.sharded import check_sizes, shard_in_place
from ds_etp.loading.deferred import is_deferred, refuse_deferred, with_progress
from ds_etp.loading.reader import ShardReader
from ds_etp.log import log_table, logger
from ds_etp.parallel.nodes import NodeSize, node_size
from ds_etp.parallel.process_groups import ExpertGroups, check_group_name_free
from ds_etp.parallel.topology import Topology
from ds_etp.patches.accelerate.auto_values import keep_block_from_accelerate
from ds_etp.patches.accelerate.state_dict import install_get_state_dict
from ds_etp.patches.deepspeed import optimizers, overrides
from ds_etp.patches.deepspeed import pipeline_autotp as stage_tp
from ds_etp.patches.deepspeed import ulysses as sequence
from ds_etp.patches.deepspeed import ulysses_autotp as sequence_tp
from ds_etp.patches.deepspeed.autotp import dense_tp_plan, skip_frozen_grad_hooks
from ds_etp.patches.deepspeed.autotp_column_inputs import fuse_column_input_grads
from ds_etp.patches.deepspeed.autotp_output_layer import whole_output_layer
from ds_etp.patches.deepspeed.engine import engine_patches, raw_config
from ds_etp.patches.deepspeed.engine_methods import install_checkpoints, install_exports
from ds_etp.patches.deepspeed.pipeline import clear_global_mpu, gathered_choices, stage_count, validate_stages
from ds_etp.patches.deepspeed.router_monitor import monitor_router
from ds_etp.patches.deepspeed.shard_save_guard import refuse_stage_files
from ds_etp.patches.deepspeed.tp_replica_check import check_first_gradients, check_first_losses
from ds_etp.patches.deepspeed.tp_replica_sync import sync_replicas
from ds_etp.patches.deepspeed.whole_parameters import install_whole_parameters
from ds_etp.patches.deepspeed.zero3_leaf_inputs import require_input_grads
from ds_etp.patches.deepspeed.zero_params import (
    is_partitioned,
    mark_expert_params,
    set_zero3_leaf_modules,
    shard_partitioned,
)
from ds_etp.patches.peft.autotp_lora import adapters_split_with_layers
from ds_etp.patches.peft.expert_lora import plain_path, split_adapters
from ds_etp.patches.peft.shared_adapters import share_adapters
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.trainers import trainer_patches
from ds_etp.patches.transformers.experts_interface import run_eagerly
from ds_etp.patches.transformers.generation import refuse_continuous_batching, sync_generation
from ds_etp.patches.transformers.sequence_loss import install_sequence_loss
from ds_etp.patches.transformers.zero3_loading import loading_patches
from ds_etp.patches.versions import check_host_versions, check_sequence_version


@dataclass
class Extension:
    """What ds_etp knows of one engine. `engine.ds_etp` holds it.

    Attributes:
        block: the config block.
        topology: the sizes it came to.
        layouts: the layout of each experts module of this rank's stage, by path; empty until the model is known.
        groups: the process groups; None until the model is sharded.
        choices: the dispatcher of each experts module, by path, and what it moves; empty until the model is sharded.
        node: how many ranks share a node, and how that is known; None until the model is sharded.
        checked: whether the model is known, and its layouts with it.
    """

    block: ExpertTensorParallelConfig
    topology: Topology
    layouts: dict[str, ExpertsLayout] = field(default_factory=dict)
    groups: ExpertGroups | None = None
    choices: dict[str, DispatchChoice] = field(default_factory=dict)
    node: NodeSize | None = None
    checked: bool = False


class _Events:
    """The moments of `patches.deepspeed.engine.EngineEvents`. Without our block each does nothing."""

    def on_config(self, engine: Any) -> None:
        """Parses and checks everything that needs no model."""
        raw = raw_config(engine)
        block = block_config.parse_block(raw)
        if block is None:
            return
        world = dist.get_world_size()
        tp = max(engine.autotp_size(), 1)
        check_signatures("accelerate")  # where it is in use
        check_host_versions(int(engine.zero_optimization_stage()), tp)
        check_host_options(raw, world)
        cp = sequence.context_parallel_size(engine)
        check_sequence_version(cp)
        topology = block_config.resolve(block, world=world, tp=tp, cp=cp, pp=stage_count(engine))
        check_axes(topology, int(engine.zero_optimization_stage()), half_dtype(raw))
        block_config.check_dispatcher(block, topology)
        check_client_optimizer(engine.client_optimizer, raw, block, topology)
        check_group_name_free(topology)
        engine.ds_etp = Extension(block, topology)

    @contextmanager
    def wrap_autotp(self, engine: Any, model: nn.Module) -> Iterator[None]:
        """Checks the layers before AutoTP makes a group, and keeps the experts out of its plan."""
        extension = _extension(engine)
        if extension is None:
            yield
            return
        _check_model(engine, model, extension)
        if extension.topology.cp > 1:
            sequence_tp.check_heads(model, extension.topology)
        share_adapters(model)
        paths = [plain_path(path) for path in extension.layouts]
        with (
            stage_tp.tp_plan_from_hf_names(model) if engine.pipeline_parallelism else nullcontext(),
            dense_tp_plan(model, paths),
            skip_frozen_grad_hooks(model),
            adapters_split_with_layers(model),
            whole_output_layer(model, extension.block.replicate_lm_head, raw_config(engine)),
        ):
            yield

    def on_model(self, engine: Any, model: nn.Module) -> None:
        """Shards the experts and tells DeepSpeed about them."""
        extension = _extension(engine)
        if extension is None:
            refuse_deferred(model)
            return
        _check_model(engine, model, extension)
        topology = extension.topology
        if topology.tp > 1 and topology.cp > 1:
            sequence_tp.lay_out_sequences(engine, model, topology)
        if topology.tp > 1:
            fuse_column_input_grads(model)
        if topology.tp > 1 and engine.pipeline_parallelism:
            stage_tp.restore_pipeline_mpu(engine, model)
        extension.node = node = node_size()
        extension.choices = choose_dispatchers(model, extension.layouts, topology, extension.block, node.ranks)
        private = build.private_groups(extension.choices.values(), engine.device)
        pipeline = engine.mpu.get_pipe_parallel_group() if topology.pp > 1 else None
        extension.groups = groups = ExpertGroups(topology, pipeline, private)
        overrides.on_destroy(engine, groups.destroy)
        if engine.pipeline_parallelism:
            overrides.on_destroy(engine, partial(clear_global_mpu, engine))
            refuse_stage_files(model)
        half = engine.fp16_enabled() or engine.bfloat16_enabled()
        unaligned, warning = build.misaligned_shards(model, extension.layouts, topology, 2 if half else None)
        for path in unaligned:
            run_eagerly(model.get_submodule(path))
        reader = ShardReader(engine, groups.zero_group)
        _shard_model(model, extension, groups, reader, zero3=int(engine.zero_optimization_stage()) == 3)
        overrides.mark_low_precision_experts(engine, (model.get_submodule(path) for path in extension.layouts))
        engine.has_moe_layers = bool(extension.layouts)
        engine.num_experts = [layout.num_experts for layout in extension.layouts.values()]
        _set_overrides(engine, model, groups)
        forwards, slower = build.experts_forwards(model)
        _log(extension, forwards)
        for sentence in filter(None, (warning, slower, *build.ineffective_options(model, extension.block))):
            _warn(sentence)

    def optimizer_arguments(self, engine: Any, client_optimizer: Any, model_parameters: Any) -> tuple[Any, Any]:
        """Checks the optimizer, and puts the experts into param groups of their own."""
        if _extension(engine) is None:
            return client_optimizer, model_parameters
        return optimizers.prepare_optimizer(engine, client_optimizer, model_parameters)

    def on_optimizer(self, engine: Any) -> None:
        """Corrects what DeepSpeed's optimizers get wrong of parameters that differ between ranks."""
        extension = _extension(engine)
        if extension is not None:
            assert extension.groups is not None  # since `on_model`
            optimizers.patch_optimizer(engine, extension.groups)


def _extension(engine: Any) -> Extension | None:
    # Not getattr: an engine passes unknown names on to its module.
    extension: Extension | None = vars(engine).get("ds_etp")
    return extension


def _check_model(engine: Any, model: nn.Module, extension: Extension) -> None:
    """Finds the layouts, before anything is changed. The second call does nothing: a pipeline's is collective."""
    if extension.checked:
        return
    raw, topology = raw_config(engine), extension.topology
    check = partial(checked_layouts, model, topology, raw)
    if engine.pipeline_parallelism:
        extension.layouts = validate_stages(engine, model, partial(check, is_stage=True), topology.tp)
    else:
        extension.layouts = check()
    extension.checked = True


def _shard_model(
    model: nn.Module, extension: Extension, groups: ExpertGroups, reader: ShardReader, *, zero3: bool
) -> None:
    block = extension.block
    modules = {path: model.get_submodule(path) for path in extension.layouts}
    set_zero3_leaf_modules(list(modules.values()))
    shared_overlap = build.enable_shared_expert_overlap(model, modules, _warn) if block.overlap else {}
    for path in with_progress(modules, show=dist.get_rank() == 0):
        module, layout = modules[path], extension.layouts[path]
        shard = build.make_shard(
            path, module, layout, groups, extension.choices[path].dispatcher, block, shared_overlap.get(path), model
        )
        mark_expert_params(module.parameters(), groups)
        if is_partitioned(module):
            shard_partitioned(module, shard, groups.zero_group)
        elif is_deferred(module):
            reader.read(module, shard)
        else:
            shard_in_place(module, shard)
    reader.finish(model)
    check_sizes(model)
    split_adapters(model, zero3=zero3)
    if zero3:
        blocks = {plain_path(path).rpartition(".")[0] for path in extension.layouts}
        require_input_grads(model.get_submodule(path) for path in sorted(blocks))


def _set_overrides(engine: Any, model: nn.Module, groups: ExpertGroups) -> None:
    overrides.allow_zero3_experts(engine)
    install_checkpoints(engine)
    install_exports(engine, model)
    install_get_state_dict()
    install_whole_parameters(engine, model, groups)
    overrides.refuse_compiled_autograd(engine)
    block = engine.ds_etp.block
    if groups.topology.cp > 1:
        sequence.fix_stage0_grad_scale(engine)
        install_sequence_loss()
    check_first_losses(engine, groups.tp)
    check_first_gradients(engine, groups.tp)
    sync_replicas(engine, groups.tp, block.replica_check_interval)
    monitor_router(engine, model, groups.topology, block.monitor_interval, block.monitor_router)
    zero3 = engine.zero_optimization_stage() == 3
    if zero3 or not tokens_are_replicated(groups.topology):
        sync_generation(model)
    if zero3 or groups.tp.size > 1 or groups.expert_model_parallel.size > 1:
        refuse_continuous_batching(model)


def _warn(sentence: str) -> None:
    if dist.get_rank() == 0:
        logger().warning(sentence)


def _log(extension: Extension, forwards: list[tuple[str, str]]) -> None:
    topology, block = extension.topology, extension.block
    choices = list(extension.choices.values())
    if topology.pp > 1:
        choices = gathered_choices(choices, topology)
    if dist.get_rank() != 0:
        return
    rows = [(name, value) for name, value in block_config.layout_table(topology, block) if name != "dispatcher"]
    rows.extend([("ranks per node", str(extension.node)), *dispatcher_rows(choices, block)])
    rows.extend([("experts modules", str(len(choices))), *forwards])
    log_table("expert tensor parallelism", rows)


_PATCHES = [*engine_patches(_Events()), *loading_patches(), *trainer_patches()]


def register() -> None:
    """Lets DeepSpeed engines made from now on read the `expert_tensor_parallel` block. Calling it twice is fine.

    At ZeRO-3, call it before `from_pretrained`.

    Raises:
        ConfigError: DeepSpeed or transformers has functions that ds_etp patches, and knows otherwise. It names them.
    """
    check_signatures()
    for patch in _PATCHES:
        patch.apply()
    keep_block_from_accelerate()


def is_registered() -> bool:
    """Whether engines made now read the block."""
    return all(patch.applied for patch in _PATCHES)


def unregister() -> None:
    """Puts DeepSpeed and transformers back. Engines made before keep what they have."""
    for patch in _PATCHES:
        patch.revert()
