"""GRPO and RLOO of TRL whose completions the engine itself generates. Runs in worker processes.

The oracle is plain DeepSpeed at ZeRO-3 with as many ranks as the split run has data-parallel ones: its ranks draw
completions from the same random numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_etp
from tests.models import make_model
from tests.sharded import Layout, full_tensors, weight
from tests.trainer.runs import Job, Outcome, arguments, as_file, deepspeed_config, forget_host_state, outcome
from tests.trainer.trl_runs import GENERATIONS, KEPT, reward, rows, tokenizer

STEPS = 3
EOS = 1


@dataclass(frozen=True)
class Rollouts:
    """What is trained.

    Attributes:
        family: of the model.
        trainer: `GRPO` or `RLOO`.
        lora: adapters on attention train, and nothing else.
        by_launcher: the DeepSpeed config's file is named by the environment, as `accelerate launch` does it.
        options: further arguments of the trainer.
    """

    family: str = "qwen3_moe"
    trainer: str = "GRPO"
    lora: bool = False
    by_launcher: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass
class Drawn:
    """What one rank's completions were, and what came of them on all ranks.

    Attributes:
        completions: token ids, in the order in which rewards were asked for.
        rewards: their average over all ranks, step by step.
        outcome: of the training; None but on rank 0.
    """

    completions: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    outcome: Outcome | None = None


def rollouts(case: Rollouts, layout: Layout, folder: str) -> Drawn:
    """Trains on this rank, under ds_etp if the layout has the block."""
    import trl
    from datasets import Dataset

    config = deepspeed_config(layout)
    if layout.with_block:
        ds_etp.register()
    else:
        del config["expert_tensor_parallel"]
    drawn = Drawn()

    def recorded(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        drawn.completions += completion_ids
        return reward(completion_ids, **columns)

    try:
        if case.by_launcher:
            os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_MIXED_PRECISION="no")
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = as_file(config, Path(folder))
        job, given = Job(rows=GENERATIONS), None if case.by_launcher else config
        plain = arguments(job, Path(folder), layout.dp, given).to_dict()
        options = {name: plain[name] for name in KEPT} | {
            "max_steps": STEPS,
            "bf16": False,
            "report_to": [],
            "gradient_checkpointing": False,
            "lr_scheduler_type": "linear",
            "num_generations": GENERATIONS,
            "max_completion_length": 6,
            # The end comes early for some, so that ranks are done at different times.
            "generation_kwargs": {"sequence_bias": [[[EOS], 2.5]]},
        }
        changes = {"router_aux_loss_coef": 0.0, "output_router_logits": False, "use_cache": True}
        model = make_model(case.family, **changes)
        if not case.lora:
            _save_for_reference(model, f"{folder}/start")
        trainer = getattr(trl, f"{case.trainer}Trainer")(
            model=model,
            args=getattr(trl, f"{case.trainer}Config")(**{**options, **dict(case.options)}),
            reward_funcs=recorded,
            processing_class=tokenizer(),
            train_dataset=Dataset.from_list(rows("grpo")),
            peft_config=_adapters() if case.lora else None,
        )
        torch.manual_seed(100 + dist.get_rank() // layout.tp)
        trainer.train()
        drawn.rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
        result = outcome(trainer)
        result.weights = full_tensors(trainer.deepspeed, weight)
        trainer.deepspeed.destroy()
        drawn.outcome = result if dist.get_rank() == 0 else None
        return drawn
    finally:
        forget_host_state()


def _save_for_reference(model: Any, folder: str) -> None:
    """TRL reads the reference model from where the model came from."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    model.config._name_or_path = folder


def _adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj", "o_proj"], r=4, init_lora_weights=False)
