"""transformers' functions that are patched, overridden, or called by position, as releases 5.0 to 5.25 have them.

How an entry is written: see `ds_etp.patches.signatures`. `_grouped_linear` isn't here: `grouped_mm` looks at it itself,
and runs the family's own forward where it is another.
"""

from __future__ import annotations

_EXISTS, _ABSENT = "=", "-"

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "transformers.modeling_utils:PreTrainedModel": {
        "save_pretrained": "self, save_directory, is_main_process, state_dict, ...",
        "_from_config": "config, **kwargs",
        "can_generate": "",
        "_keys_to_ignore_on_save": _EXISTS,
    },
    "transformers.modeling_utils": {
        "convert_and_load_state_dict_in_model": "model, state_dict, ...",
        "safe_open": _EXISTS,
        "ALL_ATTENTION_FUNCTIONS": _EXISTS,
    },
    "transformers.core_model_loading": {"revert_weight_conversion": "model, state_dict"},
    "transformers.generation.utils:GenerationMixin": {
        "generate": "self, inputs, generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, "
        "synced_gpus, ...",
        "init_continuous_batching": ("self, generation_config, ...", _ABSENT),
    },
    "transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig": {"trainer_config_process": "self, args, ..."},
    "transformers.integrations.deepspeed": {
        # Without it there is no guard to get past.
        "_apply_weight_conversions_to_state_dict": ("model, state_dict, weight_mapping", _ABSENT),
        "deepspeed_config": "",
        "deepspeed_sp_compute_loss": ("accelerator, model, inputs, return_outputs, pc", _ABSENT),
        "is_deepspeed_zero3_enabled": "",
        "unset_hf_deepspeed_config": "",
        "_hf_deepspeed_config_weak_ref": _EXISTS,
    },
    "transformers.trainer": {
        "rotate_checkpoints": ("output_dir, save_total_limit, ...", _ABSENT),
        "sort_checkpoints": ("output_dir, ...", _ABSENT),
        "shutil": _EXISTS,
    },
    "transformers.trainer_utils": {"shutil": (_EXISTS, _ABSENT)},
    "transformers.trainer:Trainer": {
        "train": "self, ...",
        "_push_from_checkpoint": "self, checkpoint_folder",
        "_rotate_checkpoints": ("self, use_mtime, output_dir", _ABSENT),
        "_sorted_checkpoints": ("self, output_dir, checkpoint_prefix, use_mtime", _ABSENT),
    },
    "safetensors.torch": {"save_model": "model, filename, ..."},
}
