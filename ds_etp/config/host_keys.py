"""Every key of DeepSpeed's config (0.19.8): tested with split experts, without effect on them, or refused.

An allow-list. `tests/config/test_host_keys.py` walks DeepSpeed's own config models and everything that an engine reads
of its config; a key that a new release brings fails it until it is decided here. What is refused is refused by a rule
of `config.host_rules.HOST_RULES`, before any process group is made. DeepSpeed reads nothing of blocks it doesn't know,
other plugins' for example, and they are no matter of this. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_etp.config.host_rules import HOST_RULES, HostRule

_KEYS = "tests/parity/test_host_keys.py"
_FP16 = "tests/parity/test_fp16.py"
_ADAM = "tests/parity/test_cpu_adam.py"
_AUTOCAST = "tests/parity/test_autocast.py"
_SETTINGS = "tests/parity/test_settings.py"


def _under(block: str, names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for name in names.split())


def _zero(names: str) -> tuple[str, ...]:
    return _under("zero_optimization", names)


# Test -> the keys that it has on, away from their defaults, with split experts.
TESTED: dict[str, tuple[str, ...]] = {
    "tests/parity/test_matrix.py::test_four_ranks": (
        *("optimizer", "optimizer.type", "optimizer.params", "zero_allow_untested_optimizer"),
        *("tensor_parallel", "tensor_parallel.autotp_size", "train_micro_batch_size_per_gpu", "zero_optimization"),
        *_zero("stage stage3_param_persistence_threshold"),
    ),
    f"{_SETTINGS}::test_accumulation_with_uneven_batches": ("gradient_accumulation_steps",),
    f"{_SETTINGS}::test_no_clipping": ("gradient_clipping",),
    f"{_SETTINGS}::test_how_gradients_are_reduced": _zero("overlap_comm reduce_bucket_size"),
    f"{_SETTINGS}::test_optimizer_offload": _zero("offload_optimizer offload_optimizer.device"),
    "tests/parity/test_bf16.py::test_bf16": (*("bf16", "bf16.enabled", "data_types", "data_types.grad_accum_dtype"),),
    "tests/parity/test_routers.py::test_jitter": _zero("leaf_module leaf_module.classes"),
    "tests/checkpoint/test_flags.py::test_flags": ("scheduler", "scheduler.type", "scheduler.params"),
    f"{_KEYS}::test_zero_1_and_2": _zero(
        "allgather_partitions allgather_bucket_size use_multi_rank_bucket_allreduce parameter_alignment "
        "ignore_unused_parameters elastic_checkpoint"
    ),
    f"{_KEYS}::test_zero_3": _zero(
        "sub_group_size stage3_prefetch_bucket_size stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "offload_param offload_param.device offload_param.pin_memory "
        "offload_optimizer.pin_memory offload_optimizer.pipeline_read offload_optimizer.pipeline_write cpu_offload"
    ),
    f"{_KEYS}::test_without_a_norm": _zero("compute_grad_norm"),
    f"{_KEYS}::test_scaled_reductions": ("prescale_gradients", "gradient_predivide_factor"),
    f"{_KEYS}::test_summed_gradients": ("gradient_allreduce_op",),
    f"{_KEYS}::test_communication_dtype": ("communication_data_type",),
    f"{_KEYS}::test_own_accumulation_boundary": ("managed_gradient_accumulation",),
    f"{_KEYS}::test_watched": (
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
        *("comms_logger", *_under("comms_logger", "enabled prof_all prof_ops verbose debug")),
        *("csv_monitor", *_under("csv_monitor", "enabled output_path job_name")),
        *("flops_profiler", *_under("flops_profiler", "enabled profile_step detailed output_file")),
    ),
    f"{_KEYS}::test_hybrid_engine": ("hybrid_engine", "hybrid_engine.enabled"),
    f"{_KEYS}::test_dense_layers": _under("tensor_parallel", "partition_config preset_model tp_overlap_comm"),
    "tests/patches/test_autotp_output_layer.py::test_a_split_that_is_asked_for": (
        "tensor_parallel.vocab_parallel_lm_head",
    ),
    f"{_FP16}::test_fp16": ("fp16", *_under("fp16", "enabled initial_scale_power")),
    f"{_FP16}::test_overflow_of_one_expert": _under(
        "fp16", "hysteresis loss_scale_window auto_cast consecutive_hysteresis min_loss_scale"
    ),
    f"{_KEYS}::test_bf16_options": (
        *_under("bf16", "immediate_grad_update check_grad_overflow"),
        *_under("data_types", "param_dtype buffer_dtype keep_in_fp32_modules"),
    ),
    f"{_FP16}::test_static_scale": ("fp16.loss_scale",),
    f"{_ADAM}::test_partial_offload": _zero("offload_optimizer.ratio"),
    f"{_ADAM}::test_masters_of_16_bits": (
        *_under("bf16", "bf16_master_weights_and_grads bf16_optimizer_states"),
        "fp16.fp16_master_weights_and_grads",
    ),
    f"{_AUTOCAST}::test_autocast": ("torch_autocast", *_under("torch_autocast", "enabled dtype")),
    f"{_AUTOCAST}::test_experts_sent_in_low_precision": ("torch_autocast.lower_precision_safe_modules",),
    f"{_KEYS}::test_device_mesh": ("sequence_parallel_size", "data_parallel_size"),
}

# Reason -> the keys that change nothing about split experts.
WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "DeepSpeed works it out from, or checks it against, other sizes": ("train_batch_size",),
    "nothing of DeepSpeed reads it, or only a warning does": ("disable_allgather", "vocabulary_size", "allgather_size"),
    "what is logged, timed or drawn": (
        *("log_level", "timers", "timers.throughput", *_under("timers.throughput", "enabled synchronized")),
        *_under("flops_profiler", "recompute_fwd_factor module_depth top_modules"),
        *("tensorboard", *_under("tensorboard", "enabled output_path job_name")),
        *("wandb", *_under("wandb", "enabled group team project")),
        "comet",
        *_under("comet", "enabled samples_log_interval project workspace api_key"),
        *_under("comet", "experiment_name experiment_key online mode"),
    ),
    "a guard that refuses slow optimizers, or none": ("zero_force_ds_cpu_optimizer",),
    "what DeepSpeed's own data loader does": (
        *("dataloader_drop_last", "data_efficiency", "data_efficiency.data_sampling", "data_efficiency.data_routing"),
        *_under("data_efficiency", "enabled seed data_routing.enabled"),
        *_under("data_efficiency.data_sampling", "enabled num_epochs num_workers pin_memory"),
    ),
    "the type that gradients travel in under Ulysses, as communication_data_type": (
        "seq_parallel_communication_data_type",
    ),
    "disks only, and offload to them is refused": (
        *("aio", *_under("aio", "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds")),
        *_zero("offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu"),
        *_zero("offload_optimizer.nvme_path offload_optimizer.buffer_count offload_optimizer.fast_init"),
    ),
    "old spellings of the offload blocks and of gather_16bit_weights_on_model_save": _zero(
        "cpu_offload_param cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save"
    ),
    "of an option that is refused": _zero("offload_optimizer.cpuadam_cores_perc"),
    "DeepSpeed refuses it itself": _zero("legacy_stage1"),
    "which modules ZeRO-3 gathers at once; each experts module is one already": _zero(
        "stage3_module_granularity_threshold leaf_module.names leaf_module.name_suffixes"
    ),
    "DeepSpeed's own checkpoints and exports, which ds_etp's stand in for": (
        *_zero("load_from_fp32_weights pipeline_loading_checkpoint stage3_gather_16bit_weights_on_model_save"),
        *("checkpoint", "checkpoint.parallel_write", "checkpoint.writer"),
        *_under("checkpoint", "tag_validation checkpoint_serialization parallel_write.pipeline_stage"),
        *_under("checkpoint.writer", "type io_buffer_size io_buffer_double io_multiplier show_statistics"),
        *_under("checkpoint.writer", "data_parallel decoupled"),
    ),
    "read by deepspeed.checkpointing.configure, which a script calls; it concerns what is kept of dense layers": (
        "activation_checkpointing",
        *_under("activation_checkpointing", "partition_activations number_checkpoints cpu_checkpointing profile"),
        *_under("activation_checkpointing", "contiguous_memory_optimization synchronize_checkpoint_boundary"),
    ),
    "how stages of a pipeline send dense activations and recompute them": (
        "pipeline",
        *_under("pipeline", "pipe_partitioned grad_partitioned use_reentrant activation_checkpoint_interval"),
        *_under("pipeline", "stages partition seed_layers"),
    ),
    "generation with DeepSpeed's kernels, of which it has none for models with experts": _under(
        "hybrid_engine",
        "max_out_tokens release_inference_cache pin_parameters tp_gather_partition_size enable_cuda_graph",
    ),
    "DeepCompile, which is refused, or engine.compile()": (
        "compile",
        *_under("compile", "autoep_non_moe free_activation free_activation_threshold offload_activation passes"),
        *_under("compile", "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log"),
        *_under("compile", "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather"),
        *_under("compile", "sync_after_allgather keep_int_input_tensors keep_all_input_tensors"),
    ),
    "DeepSpeed's inference, or how AutoTP splits dense layers": (
        *_under("tensor_parallel", "dtype injection_policy_tuple kernel_inject tp"),
        *_under("tensor_parallel.tp", "tp_size tp_grain_size mpu tp_group"),
    ),
    "an older spelling of bf16": ("bfloat16",),
}


def tested() -> dict[str, str]:
    """The test of each key that has one."""
    return {key: test for test, keys in TESTED.items() for key in keys}


def ineffective() -> dict[str, str]:
    """Why each key that has no effect has none."""
    return {key: reason for reason, keys in WITHOUT_EFFECT.items() for key in keys}


def rules_for(key: str) -> Iterator[HostRule]:
    """The rules that refuse a key: its own, and that of a block it lies in which is refused as a whole."""
    for rule in HOST_RULES:
        block = rule.key
        if rule.always:
            block = block.removesuffix(".enabled")
        if f"{key}.".startswith(f"{block}."):
            yield rule


def is_decided(key: str) -> bool:
    """Whether a key of DeepSpeed's config was looked at: it is tested, has no effect, or has a rule."""
    return key in tested() or key in ineffective() or any(rules_for(key))
