"""Sequence parallelism (Ulysses): what an engine has of it, and gradients averaged over all of its ranks.

Legend: sp ranks share a sequence, and each of them calls backward on the loss of the whole sequence, gathered or
reduced over them with a differentiable collective, as DeepSpeed's tutorial and transformers' Trainer do it. Every
rank's part then gets the gradient of that loss sp times, once from each rank. So the gradient of the unsharded
model is the sum over all ranks divided by all ranks, for dense parameters and experts alike. (A loss whose backward
gives a rank the gradient of its own part only would need a factor of sp.)

DeepSpeed 0.19.8 divides by that in places only:

    stage   dense parameters   experts
    0       world / sp         world
    1, 2    world / sp         world / sp
    3       world              world

Where it divides by world / sp, gradients and their norm are sp times too large, clipping sets in too early, and at
stage 0 the experts are out of proportion as well. The corrections here can go when DeepSpeed divides alike at all
stages (`tests/sequence/test_upstream.py` fails then).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as host_groups

from ds_etp.config.dense_rules import CP, HEAD_SINKS, HEAD_SIZES, check_sequence_heads
from ds_etp.errors import config_error
from ds_etp.parallel.topology import Topology
from ds_etp.patches.base import override

_HOW = "the mpu that UlyssesSPAttentionHF.register_with_transformers returns, given to deepspeed.initialize"


def context_parallel_size(engine: Any) -> int:
    """cp of an engine in the making; 1 for a pipeline, which `pipeline.stage_count` checks.

    Raises:
        ConfigError: an mpu of the caller's, sequence parallelism of another kind, or groups of another engine.
    """
    if engine.pipeline_parallelism:
        return 1
    cp = sequence_parallel_size(engine)
    if cp == 1 and engine.mpu is not None and engine.mpu is not host_groups:
        raise config_error(
            "mpu",
            type(engine.mpu).__name__,
            "is an mpu of its own",
            works="tensor_parallel.autotp_size in the config, and no mpu",
        )
    return cp


def deepspeed_sequence_size() -> int:
    """Ranks that share a sequence in DeepSpeed's groups module, which keeps a mesh and an earlier engine's mpu."""
    return int(host_groups._get_sequence_parallel_world_size())


def sequence_parallel_size(engine: Any) -> int:
    """How many ranks share each sequence; 1 without Ulysses.

    Raises:
        ConfigError: sequence parallelism of another kind, or groups of another engine.
    """
    if engine.mpu is not parallel_state_sp:
        left = deepspeed_sequence_size()
        own = getattr(engine.mpu, "get_sequence_parallel_world_size", lambda: 1)()
        if max(left, own) > 1:
            raise config_error(
                "sequence parallel size",
                max(left, own),
                "comes from a device mesh, an earlier engine or an mpu of another library, with which gradients have "
                "not been shown to be right",
                works=f"1, or {_HOW}",
            )
        return 1
    size = int(parallel_state_sp.get_sequence_parallel_world_size())
    _check_groups(size, max(int(engine.autotp_size()), 1))
    return size


def _check_groups(size: int, tp: int) -> None:
    """Refuses the groups that another engine with another tp has left.

    Those of Ulysses are neighbours; `sequence_tp` spreads them over tensor-parallel groups.
    """
    ranks = dist.get_process_group_ranks(parallel_state_sp.get_sequence_parallel_group())
    step = ranks[1] - ranks[0] if size > 1 else 1
    if step not in (1, tp):
        raise config_error(
            "tensor_parallel.autotp_size",
            tp,
            f"does not fit the groups of ranks that share a sequence, which an engine with {step} made in this process",
            works=str(step),
        )


def ulysses_world_size() -> int:
    """Ranks that will share a sequence, where Ulysses was registered before there is an engine; else 1."""
    group = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
    return 1 if group is None else int(dist.get_world_size(group))


def sequence_obstacle(model: Any) -> str:
    """Why Ulysses (deepspeed 0.19.8) can't share a transformers model's attention; empty where it can."""
    text = model.config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        return "its config doesn't say how many heads attention has"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return HEAD_SINKS
    # Its attention asserts that all three have `config.head_dim` (`UlyssesSPAttentionHF.forward`).
    return HEAD_SIZES if getattr(text, "kv_lora_rank", None) else ""


def check_sequences(model: Any, topology: Topology) -> None:
    """Refuses a transformers model whose attention can't be shared by the ranks of a sequence.

    A model without a config of transformers is left to Ulysses, which was told of it in another way.

    Raises:
        ConfigError: names the sizes, or what stands in the way.
    """
    if topology.cp == 1 or not hasattr(getattr(model, "config", None), "get_text_config"):
        return
    obstacle = sequence_obstacle(model)
    if obstacle:
        rule = f"does not split the attention of {type(model).__name__}: {obstacle}"
        raise config_error(CP, topology.cp, rule, works="1")
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    check_sequence_heads(topology, heads, getattr(text, "num_key_value_heads", None) or heads)


def fix_stage0_grad_scale(engine: Any) -> None:
    """Stage 0: dense gradients are divided by all ranks that they are summed over, as those of experts are."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _reduce_non_expert_gradients(*args: Any, **kwargs: Any) -> Any:
            size, engine.sequence_parallel_size = engine.sequence_parallel_size, 1
            try:
                return original(*args, **kwargs)
            finally:
                engine.sequence_parallel_size = size

        return _reduce_non_expert_gradients

    override(engine, "_reduce_non_expert_gradients", make)


def fix_zero_grad_scale(engine: Any) -> None:
    """Stages 1 to 3: the same in the ZeRO optimizer that the engine has just built.

    It reads this number for the divisor, and at stages 1 and 2 for the type to reduce in, which the engine has
    already set to `seq_parallel_communication_data_type`. Stage 3 divides by all ranks as it is, unless
    `reduce_scatter` is off.
    """
    if hasattr(engine.optimizer, "sequence_parallel_size"):
        engine.optimizer.sequence_parallel_size = 1
