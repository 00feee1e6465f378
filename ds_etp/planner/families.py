"""Model families: their config's names of sizes, and what their layers have. A family is a row of data.

A row is here only if the parameters counted from it equal those of the model transformers builds, to the element
(tests/planner/test_parameters.py). Other families are counted from the model itself: `ds-etp plan --exact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How AutoTP (deepspeed 0.19.8) splits each family follows the tp_plan of its class in transformers 5.24:
# what the tp_plan doesn't name stays whole on every rank.
_REFUSED = "AutoTP refuses this family's attention"


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        experts, columns, per_token: the config's names of E, I and K.
        attention: "heads" (with grouped keys and values) or "latent" (DeepSeek's).
        head_dim: its size where the config doesn't give it; None: hidden size / heads.
        qkv_bias, output_bias: names of the config's booleans, or the fixed answer.
        biased: whether attention has biases where the config doesn't say.
        head_norms: norms of queries and keys: none, over one head, or over all heads; or the config's boolean.
        sinks: a learned number for each head.
        layer_norm_bias: norms have a bias.
        router_bias, expert_bias, head_bias: of the router, of the experts' projections, of the output layer.
        shared: the config's name of the number of shared experts, or of their columns altogether.
        shared_gate: the shared expert has a gate of H numbers.
        norms_fp32: norms multiply by their weight in fp32.
        router_fp32: the router works on an fp32 copy of its input.
        saved_expert_tensors: tensors of I columns that an expert keeps for backward: gate and up, the activated gate
            and the product, and more where the gate is clamped.
        dense: which layers have no experts: "none", "first" (`first_k_dense_replace`) or "listed" (`mlp_only_layers`
            and `decoder_sparse_step`).
        tied: whether the embedding is the output layer too, where the config doesn't say.
        splits: what AutoTP splits beside the output layer: attention, MLPs of layers without experts, and shared
            experts.
        no_tp: why tp is 1.
    """

    experts: str
    columns: str
    per_token: str = "num_experts_per_tok"
    attention: Literal["heads", "latent"] = "heads"
    head_dim: int | None = None
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    biased: bool = False
    head_norms: Literal["none", "head", "all", "use_qk_norm"] = "none"
    sinks: bool = False
    layer_norm_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    head_bias: str | bool = False
    shared: Literal["", "n_shared_experts", "shared_expert_intermediate_size"] = ""
    shared_gate: bool = False
    norms_fp32: bool = False
    router_fp32: bool = False
    saved_expert_tensors: int = 4
    dense: Literal["none", "first", "listed"] = "none"
    tied: bool = False
    splits: tuple[Literal["attention", "dense", "shared"], ...] = ("attention", "dense", "shared")
    no_tp: str = ""


FAMILIES: dict[str, Family] = {
    "mixtral": Family("num_local_experts", "intermediate_size"),
    "qwen2_moe": Family(
        "num_experts",
        "moe_intermediate_size",
        qkv_bias="qkv_bias",
        biased=True,
        shared="shared_expert_intermediate_size",
        shared_gate=True,
        dense="listed",
        splits=("attention", "dense"),
    ),
    "qwen3_moe": Family(
        "num_experts",
        "moe_intermediate_size",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms="head",
        dense="listed",
    ),
    "olmoe": Family(
        "num_experts",
        "intermediate_size",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms="all",
        no_tp=_REFUSED,
    ),
    "gpt_oss": Family(
        "num_local_experts",
        "intermediate_size",
        head_dim=64,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        biased=True,
        sinks=True,
        router_bias=True,
        expert_bias=True,
        norms_fp32=True,
        saved_expert_tensors=7,
        splits=(),
    ),
    "deepseek_v2": Family(
        "n_routed_experts",
        "moe_intermediate_size",
        attention="latent",
        output_bias="attention_bias",
        router_fp32=True,
        shared="n_shared_experts",
        dense="first",
        no_tp=_REFUSED,
    ),
    "deepseek_v3": Family(
        "n_routed_experts",
        "moe_intermediate_size",
        attention="latent",
        output_bias="attention_bias",
        router_fp32=True,
        shared="n_shared_experts",
        dense="first",
        splits=("dense", "shared"),
    ),
    "glm4_moe": Family(
        "n_routed_experts",
        "moe_intermediate_size",
        qkv_bias="attention_bias",
        head_norms="use_qk_norm",
        router_fp32=True,
        shared="n_shared_experts",
        dense="first",
    ),
    "dots1": Family(
        "n_routed_experts",
        "moe_intermediate_size",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms="head",
        router_fp32=True,
        shared="n_shared_experts",
        dense="first",
    ),
    "phimoe": Family(
        "num_local_experts",
        "intermediate_size",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        layer_norm_bias=True,
        head_bias="lm_head_bias",
        splits=(),
    ),
}
# The same size under other names, in files written by other releases or by the models' authors.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("experts_per_token", "num_experts_per_token", "moe_topk", "moe_k"),
}
