"""DeepSpeed's functions that are patched, overridden, or called by position, as releases 0.18.6 to 0.19.8 have them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

_EXISTS, _ABSENT = "=", "-"
# What tells of its groups, by AutoTP and by Ulysses: `ulysses_autotp` hands them on by name to an mpu.
TENSOR_GETTERS = (
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
)
SEQUENCE_GETTERS = (
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
)

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "deepspeed": {"set_optimizer_flags": "config_class, model"},
    "deepspeed.runtime.engine:DeepSpeedEngine": {
        # patched while registered
        "_configure_with_arguments": "self, args, mpu",
        "_do_sanity_check": "self",
        "_configure_tensor_parallel": "self, model, tp_config",
        "_configure_distributed_model": "self, model",
        "_configure_optimizer": "self, client_optimizer, model_parameters",
        # overridden on one engine by methods of ds_etp's
        "save_checkpoint": "self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters",
        "load_checkpoint": "self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
        "load_module_only, custom_load_fn",
        "zero_gather_16bit_weights_on_model_save": "self",
        "save_16bit_model": "self, save_dir, save_filename, exclude_frozen_parameters",
        "save_fp16_model": "self, save_dir, save_filename",
        "_zero3_consolidated_16bit_state_dict": "self, exclude_frozen_parameters",
        "_consolidated_16bit_state_dict": "self, exclude_frozen_parameters",
        "clip_fp32_gradients": "self",
        "_validate_zero3_moe_compatibility": ("self", _ABSENT),  # absent before 0.19.4, refused at ZeRO-3
        # wrapped on one engine; arguments are passed on
        "backward": "self, loss, ...",
        "step": "self, ...",
        "_take_model_step": "self, ...",
        "_reduce_non_expert_gradients": "self, ...",
        "destroy": "self",
        "compile": "self, backend, compile_kwargs, ...",
        "get_data_types": "self",
    },
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": {
        "scaled_global_norm": "self, ...",
        "_lazy_init_hp_params_optimizer_state": "self",
        "update_lp_params": "self",
    },
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": {
        "_unflatten_partitioned_parameters": "self, sub_group_id",
        "get_param_id": "self, param",
        "checkpoint_event_prologue": "self",
        "checkpoint_event_epilogue": "self",
    },
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": {
        "get_grads_for_norm": "self, for_clipping",
        "_lazy_init_hp_params_optimizer_state": "self",
        "update_lp_params": "self",
    },
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer": {
        "unscale_and_clip_grads": "self, total_norm, apply_scale",
    },
    # The other parameters differ between releases; `versions.check_muon_version` refuses all but one.
    "deepspeed.runtime.zero.muon.original_muon": {"muon_update": "grad, momentum, beta, ..."},
    "deepspeed.runtime.zero.muon.muon_optimizer": {"muon_update": ("grad, momentum, beta, ...", _ABSENT)},
    "deepspeed.runtime.zero.partition_parameters": {"register_external_parameter": "module, parameter"},
    "deepspeed.runtime.zero.partition_parameters:GatheredParameters": {
        "__init__": "self, params, modifier_rank, fwd_module, enabled",
        "__enter__": "self",
        "__exit__": "self, ...",
    },
    "deepspeed.runtime.pipe.module:PipelineModule": {
        "save_state_dict": "self, save_dir, checkpoint_engine, exclude_frozen_params",
        "load_state_dir": "self, load_dir, checkpoint_engine, strict",
        "mpu": "self",
    },
    "deepspeed.runtime.pipe.topology:ProcessTopology": {"get_dim": "self, axis", "get_coord": "self, rank"},
    "deepspeed.runtime.tensor_parallel.config": {"_get_hf_tp_plan": ("model", _ABSENT)},  # absent before 0.19
    "deepspeed.module_inject.auto_tp:AutoTP": {
        "_replace": "self, child, name, ...",
        "_replace_with_config": "self, child, name",
        "_is_vocab_parallel_lm_head": ("self, child, name", _ABSENT),  # absent before 0.19.5
        "_get_model_type": "self",
    },
    "deepspeed.module_inject.autotp_config:AutoTPConfig": {"find_matching_spec": "self, param_name, model_type"},
    "deepspeed.module_inject.tp_plan_converter:TPPlanConverter": {"convert": ("hf_tp_plan", _ABSENT)},
    "deepspeed.module_inject.layers:ColumnParallel": {"forward": "ctx, group, input"},
    "deepspeed.module_inject.layers:LinearLayer": {"forward": "self, input"},
    "deepspeed.moe.utils": {
        "is_moe_param": "param",
        "split_params_into_different_moe_groups_for_optimizer": "param_groups, ...",
    },
    "deepspeed.runtime.utils": {"is_model_parallel_parameter": "p"},
    "deepspeed.utils.z3_leaf_module": {"set_z3_leaf_module": "model, flag", "z3_leaf_module": "model"},
    "deepspeed.utils.groups": {
        "_get_sequence_parallel_world_size": "",
        "_EXPERT_PARALLEL_GROUP": _EXISTS,
        "_EXPERT_DATA_PARALLEL_GROUP": _EXISTS,
        "_EXPERT_PARALLEL_GROUP_RANKS": _EXISTS,
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS": _EXISTS,
        "mpu": _EXISTS,
        **dict.fromkeys(TENSOR_GETTERS, _EXISTS),
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "_SEQUENCE_PARALLEL_GROUP": _EXISTS,
        "_SEQUENCE_DATA_PARALLEL_GROUP": _EXISTS,
        **dict.fromkeys(SEQUENCE_GETTERS, _EXISTS),
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF": {
        "__init__": "self, attn, batch_size, attn_head_count, attn_head_size, kv_head_count, num_hidden_layers, "
        "process_group, ...",
    },
}
