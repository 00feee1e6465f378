"""TRL's functions that are patched, as release 1.16 has them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

_ROLLOUTS: dict[str, str | tuple[str, ...]] = {
    "_get_train_sampler": "self, dataset",
    "_generate_and_score_completions": "self, inputs",
    "_generate": "self, ...",
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
}

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "trl.generation.vllm_generation:VLLMGeneration": {
        "_iter_named_params": "self",
        "sync_weights": "self",
        "_fix_param_name_to_vllm": "self, name, ...",
    },
    "trl.trainer.grpo_trainer:GRPOTrainer": _ROLLOUTS,
    "trl.trainer.rloo_trainer:RLOOTrainer": _ROLLOUTS,
}
