"""OpenRLHF's functions that are patched, as release 0.11 has them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy": {
        "get_ds_train_config": "self, ...",
        "get_ds_eval_config": "self, ...",
        "_ds_init_train_model": "self, model, ...",
        "_ds_init_eval_model": "self, model, ...",
        "_unwrap_model": "self, model",
        "save_model": "self, model, tokenizer, output_dir, **kwargs",
    },
    "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer": {"broadcast_to_vllm": "self"},
}
