"""A case's model on this rank, ready to train: the same weights and batches whoever trains it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Case, Shape

RATE = 1e-4
# DeepSpeed's own default allocates 2 GB a buffer, far more than these models have.
BUCKET = 1 << 22
_ATTENTION = [
    {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
]


def build(shape: Shape, family: str = "mixtral") -> Any:
    """The model in one piece, from a fixed seed."""
    import transformers

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "num_experts_per_tok": shape.per_token,
        "max_position_embeddings": shape.length,
        "use_cache": False,
    }
    if family == "mixtral":
        common |= {"intermediate_size": shape.intermediate, "num_local_experts": shape.experts}
        config = transformers.MixtralConfig(**common)
    else:
        common |= {"moe_intermediate_size": shape.intermediate, "n_routed_experts": shape.experts}
        common |= {"n_shared_experts": 1, "first_k_dense_replace": 0, "head_dim": shape.hidden // shape.heads}
        config = transformers.Glm4MoeConfig(**common)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def batch(shape: Shape, case: Case, step: int, device: torch.device) -> Tensor:
    """This rank's token ids `[sequences, length]`. Tensor-parallel peers have the same ones.

    Raises:
        ValueError: a step's sequences don't divide over the ranks.
    """
    sequences, rest = divmod(shape.tokens, shape.length * case.dp)
    if rest:
        raise ValueError(f"{shape.tokens} tokens are no whole sequences of {shape.length} for {case.dp} ranks.")
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank() // case.tp)
    return torch.randint(0, shape.vocabulary, (sequences, shape.length), generator=generator).to(device)


class Trainee:
    """What is timed: forward and backward without gradient reduction, and a whole step."""

    model: Any
    device: torch.device

    def forward_backward(self, ids: Tensor) -> None:
        """Forward and backward on `[sequences, length]`; gradients stay where they are."""
        raise NotImplementedError

    def step(self, ids: Tensor) -> None:
        """A whole step: forward, backward, reduction, optimizer."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forgets gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def optimizer_tensors(self) -> list[Tensor]:
        """What the optimizer keeps between steps beside the parameters, masters included."""
        raise NotImplementedError


class EngineTrainee(Trainee):
    """DeepSpeed's engine: plain, with AutoEP, or with ds_etp."""

    def __init__(self, shape: Shape, case: Case) -> None:
        import deepspeed

        if case.kind == "ours":
            import ds_etp

            ds_etp.register()
        model = build(shape, case.family).train()
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=deepspeed_config(case)
        )
        self.model, self.device = self.engine.module, torch.device(self.engine.device)

    def forward_backward(self, ids: Tensor) -> None:
        """See `Trainee.forward_backward`."""
        self._run(ids, boundary=False)

    def step(self, ids: Tensor) -> None:
        """See `Trainee.step`."""
        self._run(ids, boundary=True)
        self.engine.step()

    def _run(self, ids: Tensor, boundary: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(boundary)
        self.engine.backward(self.engine(input_ids=ids, labels=ids).loss)

    def optimizer_tensors(self) -> list[Tensor]:
        """See `Trainee.optimizer_tensors`."""
        optimizer = self.engine.optimizer
        masters = list(optimizer.single_partition_of_fp32_groups)
        return masters + _state_tensors(optimizer.optimizer)


def deepspeed_config(case: Case) -> dict[str, Any]:
    """ZeRO-1, plain AdamW, no clipping: the same for every engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "steps_per_print": 10**9,
    }
    if case.tp > 1:
        config["tensor_parallel"] = {"autotp_size": case.tp}
    if case.kind == "ours":
        config["expert_tensor_parallel"] = {"etp_size": case.etp, "ep_size": case.ep, "dispatcher": case.dispatcher}
        config["expert_tensor_parallel"] |= {"overlap": True} if case.overlap else {}
    if case.kind == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": case.ep, "preset_model": "mixtral"}
        if case.tp > 1:
            # AutoTP refuses transformers' own dispatcher for its experts' entries: the rest of it, spelled out.
            config["tensor_parallel"]["partition_config"] = {"layer_specs": _ATTENTION}
    return config


class TransformersTrainee(Trainee):
    """transformers' own parallelism: tensor, expert, or both, with plain AdamW."""

    def __init__(self, shape: Shape, case: Case, folder: Path) -> None:
        import transformers
        from transformers.distributed import DistributedConfig

        if dist.get_rank() == 0:
            build(shape).save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(tp_size=case.tp, fsdp_size=case.dp, ep_size=case.ep)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=config
        ).train()
        if torch.cuda.is_available():
            self.model.to(torch.device("cuda", torch.cuda.current_device()))  # where one process has loaded it alone
        self.device = next(self.model.parameters()).device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def forward_backward(self, ids: Tensor) -> None:
        """See `Trainee.forward_backward`."""
        with self._without_reduction():
            self.model(input_ids=ids, labels=ids).loss.backward()

    def step(self, ids: Tensor) -> None:
        """See `Trainee.step`."""
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def _without_reduction(self) -> Any:
        wrapped = [module for module in self.model.modules() if hasattr(module, "set_requires_gradient_sync")]
        for module in wrapped:
            module.set_requires_gradient_sync(False)
        yield
        for module in wrapped:
            module.set_requires_gradient_sync(True)

    def optimizer_tensors(self) -> list[Tensor]:
        """See `Trainee.optimizer_tensors`."""
        return _state_tensors(self.optimizer)


def _state_tensors(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def make_trainee(shape: Shape, case: Case, folder: str) -> Trainee:
    """A case's trainee on this rank.

    Args:
        folder: one of the launch's own, where ranks may leave files for each other.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if case.kind == "transformers":
        return TransformersTrainee(shape, case, Path(folder) / "model")
    return EngineTrainee(shape, case)
