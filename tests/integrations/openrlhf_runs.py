"""Trainings by OpenRLHF's own strategy, which builds DeepSpeed's config in code. Runs in worker processes.

OpenRLHF imports flash_attn, ray and vllm whether it uses them or not. What of them isn't installed is stood in for by
empty names: nothing here calls them but `ray.get`. On a machine without CUDA its two calls of it are stood in for too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_etp
from ds_etp.activation import VARIABLE
from ds_etp.integrations.openrlhf import add_block
from tests.models import make_batch, make_model
from tests.oracle import ADAM_EPS, Run
from tests.sharded import Layout, full_tensors, weight
from tests.trainer.runs import forget_host_state

STEPS, ROWS, ACCUMULATE, LENGTH = 3, 2, 2, 12
_ABSENT = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
    "ray": ("get", "get_gpu_ids", "kill", "is_initialized"),
    "ray.util": (),
    "ray.util.placement_group": ("PlacementGroup", "placement_group"),
    "ray.util.scheduling_strategies": ("PlacementGroupSchedulingStrategy",),
    "vllm": ("SamplingParams",),
    "vllm.inputs": ("TokensPrompt",),
    "vllm.utils": ("random_uuid",),
}


def _stand_in(package: str) -> None:
    """Modules of a package that isn't installed, with the names that OpenRLHF imports."""
    for name, names in _ABSENT.items():
        if name.split(".")[0] != package:
            continue
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update({entry: type(entry, (), {}) for entry in names})
        if name == "ray":
            module.remote = _remote  # type: ignore[attr-defined]
        sys.modules[name] = module
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)


def _remote(*given: Any, **_: Any) -> Any:
    """`ray.remote`, with and without arguments."""
    return given[0] if given else lambda decorated: decorated


@contextlib.contextmanager
def openrlhf() -> Iterator[Any]:
    """OpenRLHF's `openrlhf.utils.deepspeed.deepspeed`, importable for a while; unpatched by what ran before."""
    before, variables = set(sys.modules), dict(os.environ)
    # What a launcher sets, and DeepSpeed asks for where it is told to make the process groups.
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    for package in ("flash_attn", "ray", "vllm"):
        if importlib.util.find_spec(package) is None:
            _stand_in(package)
    try:
        yield importlib.import_module("openrlhf.utils.deepspeed.deepspeed")
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("openrlhf", "flash_attn", "ray", "vllm"):
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(variables)
        os.environ.pop(VARIABLE, None)
        forget_host_state()


def strategy_of(module: Any, layout: Layout) -> Any:
    """The strategy as `get_strategy` makes it from a command line, in fp32: its own choices are bf16 and fp16."""

    class Strategy(module.DeepspeedStrategy):  # type: ignore[misc]
        def get_ds_train_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super().get_ds_train_config(*args, **kwargs)
            if "optimizer" in config:
                config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own would be compiled here
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            return config

    settings = SimpleNamespace(param_dtype="bf16", zero_stage=layout.stage, tensor_parallel_size=layout.tp, zpg=1)
    made = Strategy(
        max_norm=0.5,
        micro_train_batch_size=ROWS,
        train_batch_size=ROWS * ACCUMULATE * layout.dp,
        zero_stage=layout.stage,
        args=SimpleNamespace(ds=settings, train=SimpleNamespace()),
    )
    made.param_dtype = "fp32"
    return made


def prepared(module: Any, layout: Layout, folder: str) -> tuple[Any, Any]:
    """The strategy, and an actor read from a folder whose engine it has made."""
    strategy = strategy_of(module, layout)
    helpers = importlib.import_module("openrlhf.utils.utils")
    helpers.convert_to_torch_dtype = lambda _: torch.float32
    module.torch_dist_barrier_and_cuda_sync = dist.barrier
    actor = module.Actor(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        ds_config=strategy.get_ds_train_config(),
    )
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": ADAM_EPS, "weight_decay": 0.1}
    plan = {"optim": "adam", "adam": adam, "lr_scheduler": "constant", "max_norm": 0.5, "scheduler_steps": STEPS}
    actor, optimizer, scheduler = strategy.prepare((actor, plan))
    strategy.optimizer, strategy.scheduler = optimizer, scheduler
    return strategy, actor


def steps(strategy: Any, actor: Any, layout: Layout, first: int = 0, last: int = STEPS) -> Run:
    """Trains as OpenRLHF's SFT trainer does."""
    loss_of = importlib.import_module("openrlhf.models").SFTLoss()
    run, data_rank = Run(), dist.get_rank() // layout.tp
    actor.train()
    for step in range(first, last):
        total = torch.zeros(())
        for micro in range(ACCUMULATE):
            ids = make_batch(step * ACCUMULATE + micro, data_rank, ROWS, LENGTH)["input_ids"]
            scores, _ = actor(ids, attention_mask=torch.ones_like(ids), return_output=True, return_logprobs=True)
            loss = loss_of(scores, torch.ones_like(ids)[:, :-1])
            strategy.backward(loss, actor, strategy.optimizer)
            strategy.optimizer_step(strategy.optimizer, actor, strategy.scheduler)
            total += loss.detach() / ACCUMULATE
        dist.all_reduce(total)
        run.losses.append(total.item() / dist.get_world_size())
        run.norms.append(strategy.get_grad_norm(actor))
    return run


def save_start(folder: Path) -> None:
    """The model that trainings start from."""
    make_model("qwen3_moe").save_pretrained(folder)


def train(layout: Layout, start: str, folder: str) -> Run | None:
    """Trains, saves a checkpoint after the second step and the model after the last. Rank 0 returns the run."""
    if layout.with_block:
        add_block({"etp_size": layout.etp, "ep_size": layout.ep})  # before OpenRLHF is imported
    with openrlhf() as module:
        strategy, actor = prepared(module, layout, start)
        run = steps(strategy, actor, layout, last=STEPS - 1)
        if layout.with_block:
            strategy.save_ckpt(actor.model, f"{folder}/ckpt", tag="step2", client_state={"consumed_samples": 8})
        after = steps(strategy, actor, layout, first=STEPS - 1)
        run.losses += after.losses
        run.norms += after.norms
        run.weights = full_tensors(actor.model, weight)
        if layout.with_block:
            strategy.save_model(actor, SimpleNamespace(save_pretrained=lambda _: None), f"{folder}/model")
        actor.model.destroy()
        return run if dist.get_rank() == 0 else None


def resume(layout: Layout, start: str, folder: str) -> Run | None:
    """Goes on from the checkpoint, split in another way."""
    with openrlhf() as module:
        add_block({"etp_size": layout.etp, "ep_size": layout.ep})
        strategy, actor = prepared(module, layout, start)
        _, states = strategy.load_ckpt(actor.model, f"{folder}/ckpt")
        assert states["consumed_samples"] == 8
        run = steps(strategy, actor, layout, first=STEPS - 1)
        run.weights = full_tensors(actor.model, weight)
        actor.model.destroy()
        return run if dist.get_rank() == 0 else None


def sync(layout: Layout, start: str) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, Tensor], str]:
    """What rank 0 announces and sends to vLLM; or the error that it is refused with."""
    with openrlhf() as module:
        add_block({"etp_size": layout.etp, "ep_size": layout.ep})
        hosts = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
        strategy, actor = prepared(module, layout, start)
        announced: list[tuple[str, tuple[int, ...]]] = []
        sent: dict[str, Tensor] = {}

        def update_weight(name: str, shape: Any, **_: Any) -> None:
            announced.append((name, tuple(shape)))

        def broadcast(tensor: Tensor, **_: Any) -> None:
            sent[announced[-1][0]] = tensor.clone()

        trainer = object.__new__(hosts.ActorPPOTrainer)
        strategy.args.vllm = SimpleNamespace()
        vars(trainer).update(strategy=strategy, actor=actor, use_cuda_ipc=False)
        trainer.vllm_engines = [SimpleNamespace(update_weight=SimpleNamespace(remote=update_weight))]
        trainer._model_update_group = SimpleNamespace(broadcast=broadcast)
        hosts.torch_dist_barrier_and_cuda_sync = dist.barrier
        hosts.ray.get = lambda refs: refs
        stream, torch.cuda.current_stream = torch.cuda.current_stream, lambda: None  # type: ignore[assignment]
        said = ""
        try:
            trainer.broadcast_to_vllm()
        except ds_etp.ConfigError as error:
            said = str(error)
        finally:
            torch.cuda.current_stream = stream
        actor.model.destroy()
        return announced, sent, said


def dense_config(layout: Layout) -> bool:
    """Whether a model without experts gets the block, as a reward model would."""
    with openrlhf() as module:
        add_block({"etp_size": layout.etp})
        strategy = strategy_of(module, layout)
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        engine = strategy.prepare(LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)))
        found = "expert_tensor_parallel" in engine._config._param_dict
        engine.destroy()
        return found
