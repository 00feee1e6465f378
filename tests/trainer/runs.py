"""One Trainer run, plain or under ds_etp, and what it logged. The sharded one runs in worker processes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import ds_etp
from tests.models import make_batch, make_model
from tests.oracle import ADAM_EPS
from tests.sharded import Layout, full_tensors, weight

LENGTH = 12


@dataclass(frozen=True)
class Job:
    """What is trained, apart from how it is split.

    Attributes:
        rows: sequences a micro batch; `micros`: micro batches a step, over all data-parallel ranks.
        train, held_out: sequences in the data sets.
        options: further `TrainingArguments`.
        aux: the factor of the routers' auxiliary loss.
        stop_after: ends after this step, with the schedule of the whole run; 0 never.
        resume: whether to go on from the last checkpoint in the folder.
        positions: whether the data holds the tokens' positions, which split sequences need.
    """

    family: str = "mixtral"
    rows: int = 2
    micros: int = 4
    train: int = 24
    held_out: int = 8
    options: tuple[tuple[str, Any], ...] = ()
    aux: float = 0.05
    stop_after: int = 0
    resume: bool = False
    positions: bool = False


@dataclass
class Outcome:
    """What a run logged, step by step, and its weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sequences. Each has another number of tokens that count, so that a wrong average shows."""

    def __init__(self, count: int, first: int = 0, positions: bool = False) -> None:
        self.count, self.first, self.positions = count, first, positions

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = make_batch(self.first + index, 0, 1, LENGTH)["input_ids"][0]
        labels = ids.clone()
        labels[: index % 5] = -100
        row = {"input_ids": ids, "labels": labels}
        return {**row, "position_ids": torch.arange(LENGTH)} if self.positions else row


def arguments(job: Job, folder: Path, ranks: int, deepspeed: dict[str, Any] | str | None) -> TrainingArguments:
    """The same training for any number of data-parallel ranks."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": job.rows,
        "per_device_eval_batch_size": job.rows,
        "gradient_accumulation_steps": job.micros // ranks,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": ADAM_EPS,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "optim": "adamw_torch",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "deepspeed": deepspeed,
    }
    return TrainingArguments(**{**options, **dict(job.options)})


class StopAfter(TrainerCallback):
    """Ends a run early."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by Trainer."""
        control.should_training_stop = state.global_step == self.step


def run(
    job: Job, folder: Path, ranks: int = 1, deepspeed: dict[str, Any] | str | None = None, model: Any = None
) -> Trainer:
    """Trains to the end and returns the trainer."""
    # The model first: under ZeRO-3 arguments, transformers draws other random weights.
    model = model or make_model(job.family, router_aux_loss_coef=job.aux)
    trainer = Trainer(
        model=model,
        args=arguments(job, folder, ranks, deepspeed),
        train_dataset=Sequences(job.train, positions=job.positions),
        eval_dataset=Sequences(job.held_out, first=500, positions=job.positions),
        callbacks=[StopAfter(job.stop_after)] if job.stop_after else [],
    )
    trainer.train(resume_from_checkpoint=job.resume or None)
    return trainer


def outcome(trainer: Trainer) -> Outcome:
    """What a trainer logged."""
    logs = trainer.state.log_history
    return Outcome(
        [log["loss"] for log in logs if "loss" in log],
        [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
        [log["learning_rate"] for log in logs if "learning_rate" in log],
        [log["eval_loss"] for log in logs if "eval_loss" in log],
    )


def run_plain(job: Job, folder: Path) -> Outcome:
    """The oracle: Trainer alone, in this process."""
    trainer = run(job, folder)
    result = outcome(trainer)
    result.weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return result


def deepspeed_config(layout: Layout) -> dict[str, Any]:
    """A config as a Trainer user writes it: what Trainer knows is `auto`, and there is no optimizer in it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
        "expert_tensor_parallel": {
            "etp_size": layout.etp,
            "ep_size": layout.ep,
            **dict(layout.extra).get("expert_tensor_parallel", {}),
        },
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    for key, value in layout.extra:
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


# Every key of the block that takes "auto", which Trainer and accelerate have a meaning of their own for.
AUTO = dict.fromkeys(("etp_size", "dispatcher", "reduce_dtype", "replicate_lm_head"), "auto")


def as_file(config: dict[str, Any], folder: Path) -> str:
    """A config as a file, the same one for all ranks: what scripts name on their command lines."""
    path = folder / "ds.json"
    if int(os.environ.get("RANK", "0")) == 0:
        path.write_text(json.dumps(config))
    torch.distributed.barrier()
    return str(path)


def forget_host_state() -> None:
    """transformers and accelerate keep the last run's settings in modules and in the environment."""
    from accelerate.state import AcceleratorState, GradientState
    from deepspeed.runtime.tensor_parallel import init_utils
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    init_utils._TP_MODEL_INIT_ARGS = None  # Trainer's tp_model_init would split the next model too
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def run_sharded(
    job: Job, layout: Layout, folder: str, load_from: str | None = None, config_file: bool = False
) -> Outcome | None:
    """Trainer under ds_etp on this rank. Rank 0 returns what it did, its weights gathered.

    Args:
        job, layout, folder: what is trained, how it is split, and where Trainer writes.
        load_from: the folder of a saved model.
        config_file: the DeepSpeed config is a file.

    Writes the model with `save_model` to `<folder>/model`.
    """
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    ds_etp.register()
    try:
        model, facts = None, {}
        if load_from is not None:
            # What Trainer users do: arguments first, then ZeRO-3 partitions weights while they are read.
            keep = arguments(job, Path(folder), layout.dp, deepspeed_config(layout))
            model = AutoModelForCausalLM.from_pretrained(load_from)
            experts = [p for name, p in model.named_parameters() if ".experts." in name]
            facts["held"] = sum(p.ds_tensor.numel() + p.numel() for p in experts)
            facts["experts"] = sum(p.ds_numel for p in experts)
            del keep
        config = deepspeed_config(layout)
        trainer = run(job, Path(folder), layout.dp, as_file(config, Path(folder)) if config_file else config, model)
        result = outcome(trainer)
        result.facts.update(facts)
        trainer.save_model(f"{folder}/model")
        result.weights = full_tensors(trainer.deepspeed, weight)
        result.facts["steps"] = trainer.state.global_step
        result.facts["best"] = trainer.state.best_model_checkpoint
        result.facts["expert"] = next(
            getattr(p, "ds_shape", p.shape)
            for n, p in trainer.model.named_parameters()
            if n.endswith("experts.down_proj")
        )
        trainer.deepspeed.destroy()
        return result if dist.get_rank() == 0 else None
    finally:
        forget_host_state()
