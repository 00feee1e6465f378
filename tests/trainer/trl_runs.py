"""One run of a TRL trainer, plain or under ds_etp. The sharded one runs in worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

import ds_etp
from tests.models import VOCABULARY, make_model
from tests.sharded import Layout, full_tensors, weight
from tests.trainer.runs import Job, Outcome, arguments, deepspeed_config, forget_host_state, outcome

KEPT = (  # of Trainer's arguments
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "adam_epsilon",
    "adam_beta2",
    "max_grad_norm",
    "use_cpu",
    "deepspeed",
    "logging_steps",
    "save_strategy",
    "disable_tqdm",
)
GENERATIONS = 2


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        kind: `sft`, `dpo` or `grpo`.
        lora: adapters on attention train, and nothing else; DPO's reference is then an adapter of its own.
        sampled: whether GRPO generates; else its completions follow from the prompts, the same in any layout.
        options: further arguments of the trainer.
    """

    kind: str
    lora: bool = False
    sampled: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0` to `w92`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{place}" for place in range(VOCABULARY - 3))]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def line(place: int, length: int) -> str:
    """Words that follow from a number."""
    return " ".join(f"w{(place * step + place) % 90}" for step in range(1, length + 1))


def rows(kind: str) -> list[dict[str, str]]:
    """24 samples, of lengths that differ."""
    if kind == "sft":
        return [{"text": line(place, 5 + place % 4)} for place in range(1, 25)]
    if kind == "grpo":
        return [{"prompt": line(place, 3 + place % 3)} for place in range(1, 25)]
    return [
        {
            "prompt": line(place, 4),
            "chosen": " " + line(place + 30, 3 + place % 3),
            "rejected": " " + line(place + 60, 4),
        }
        for place in range(1, 25)
    ]


def complete(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """GRPO's rollouts: the completions of a prompt differ, and are the same wherever they are made."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [
        [3 + (sum(prompt) * (place % GENERATIONS + 2) + step) % 90 for step in range(4 + place % GENERATIONS)]
        for place, prompt in enumerate(ids)
    ]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """For GRPO: follows from the completion."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def train(case: Case, layout: Layout, folder: Path, deepspeed: dict[str, Any] | None) -> Any:
    """Trains for three steps and returns the trainer."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    ranks = layout.dp if deepspeed else 1
    plain = arguments(Job(rows=GENERATIONS), folder, ranks, deepspeed).to_dict()
    options = {name: plain[name] for name in KEPT}
    options.update(max_steps=3, bf16=False, report_to=[], gradient_checkpointing=False, lr_scheduler_type="linear")
    model = make_model("mixtral", router_aux_loss_coef=0.0, output_router_logits=False)
    keywords: dict[str, Any] = {
        "processing_class": tokenizer(),
        "train_dataset": Dataset.from_list(rows(case.kind)),
    }
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], r=4, init_lora_weights=False) if case.lora else None
    if case.kind == "sft":
        return _run(SFTTrainer, SFTConfig(**options, max_length=16, **dict(case.options)), model, lora, keywords)
    if case.kind == "dpo":
        if lora is not None:  # trained before: TRL makes the adapter's copy the reference
            model, lora = get_peft_model(model, lora), None
        else:
            keywords["ref_model"] = make_model("mixtral", router_aux_loss_coef=0.0, output_router_logits=False)
        return _run(DPOTrainer, DPOConfig(**options, max_length=16, **dict(case.options)), model, lora, keywords)
    keywords |= {"reward_funcs": reward} | ({} if case.sampled else {"rollout_func": complete})
    config = GRPOConfig(
        **{**options, "num_generations": GENERATIONS, **dict(case.options)}, max_completion_length=5, beta=0.0
    )
    return _run(GRPOTrainer, config, model, lora, keywords)


def _run(trainer_class: Any, config: Any, model: Any, lora: Any, keywords: dict[str, Any]) -> Any:
    if lora is not None:
        keywords["peft_config"] = lora
    trainer = trainer_class(model=model, args=config, **keywords)
    trainer.train()
    return trainer


def run_plain(case: Case, folder: Path) -> Outcome:
    """The oracle: TRL alone, in this process."""
    trainer = train(case, Layout(world=1), folder, None)
    result = outcome(trainer)
    result.weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return result


def run_sharded(case: Case, layout: Layout, folder: str) -> Outcome | None:
    """TRL under ds_etp on this rank. Rank 0 returns what it did, its weights gathered."""
    ds_etp.register()
    try:
        config = deepspeed_config(layout)
        for key, value in layout.extra:
            config[key] = {**config.get(key, {}), **value}
        trainer = train(case, layout, Path(folder), config)
        result = outcome(trainer)
        result.weights = full_tensors(trainer.deepspeed, weight)
        trainer.save_model(f"{folder}/model")
        trainer.deepspeed.destroy()
        return result if dist.get_rank() == 0 else None
    finally:
        forget_host_state()
