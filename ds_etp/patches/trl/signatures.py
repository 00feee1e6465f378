"""TRL's functions that are patched, as releases 0.24 to 1.16 have them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

_ABSENT = "-"

_ROLLOUTS: dict[str, str | tuple[str, ...]] = {
    "_get_train_sampler": "self, dataset",
    "_generate_and_score_completions": "self, inputs",
    "_generate": "self, ...",
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
}

# What its trainers need under tensor parallelism.
TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "trl.trainer.grpo_trainer:GRPOTrainer": _ROLLOUTS,
    "trl.trainer.rloo_trainer:RLOOTrainer": _ROLLOUTS,
}

# What its weight sync with vLLM needs, which has an iterator over the parameters from 1.11 on.
VLLM: dict[str, dict[str, str | tuple[str, ...]]] = {
    "trl.generation.vllm_generation:VLLMGeneration": {
        "_iter_named_params": "self",
        "sync_weights": "self",
        "_fix_param_name_to_vllm": "self, name, ...",
    },
    # Trainers' own syncs, which are refused.
    "trl.trainer.grpo_trainer:GRPOTrainer": {"_move_model_to_vllm": ("self", _ABSENT)},
    "trl.trainer.rloo_trainer:RLOOTrainer": {"_move_model_to_vllm": ("self", _ABSENT)},
}
