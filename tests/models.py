"""Small models of real Hugging Face classes, and batches for them. The same on every rank and in the oracle."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "output_router_logits": True,  # the auxiliary loss takes part in the parity
    "use_cache": False,
}
# A token may go to experts of 2 of the 4 groups; the first layer has no experts.
_GROUPED: dict[str, Any] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
# I is 16 where etp goes up to 4; E is 4 where ep goes up to 2.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 16, "num_local_experts": 4, "router_aux_loss_coef": 0.05}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "head_dim": 8,
            "router_aux_loss_coef": 0.05,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 16, "num_experts": 4, "router_aux_loss_coef": 0.05}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "router_aux_loss_coef": 0.05,
        },
    ),
    # Kinds of layout: transposed with biases and gate and up interleaved; transposed; no gate; all tokens to every
    # expert; experts without weights.
    "gpt_oss": (
        "GptOssConfig",
        {"intermediate_size": 16, "num_local_experts": 4, "head_dim": 8, "router_aux_loss_coef": 0.05},
    ),
    "aria_text": ("AriaTextConfig", {"intermediate_size": 16, "moe_num_experts": 4, "moe_topk": 2}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["attention", "moe"],
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "head_dim": 8,
            "mamba_num_heads": 2,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 4,
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {"intermediate_size": 16, "intermediate_size_mlp": 32, "num_local_experts": 4, "head_dim": 8},
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            "num_layers": 1,
            "head_dim": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_GROUPED, **_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**_GROUPED, **_LATENT, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4MoeConfig", {**_GROUPED, "norm_topk_prob": True, "head_dim": 8}),
}


def make_config(family: str, **changes: Any) -> Any:
    """The small config of a family, with changes."""
    name, special = CONFIGS[family]
    return getattr(transformers, name)(**{**_COMMON, **special, **changes})


def make_model(family: str, seed: int = 7, implementation: str = "eager", **changes: Any) -> Any:
    """A model with random weights from `seed`, spread enough that every expert is picked by some token."""
    torch.manual_seed(seed)
    config = make_config(family, **changes)
    config._experts_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    return model


def make_batch(
    step: int, data_rank: int, rows: int = 2, length: int = 12, padding: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """One micro batch of one data-parallel rank: `[rows, length]` token ids, labels alike.

    Where `padding` is given, its entries are taken in turn by the rows of all ranks: that many positions on the
    left are padding, which the attention mask and the labels leave out.
    """
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    if not padding:
        return {"input_ids": ids, "labels": ids.clone()}
    left = torch.tensor([padding[(data_rank * rows + row) % len(padding)] for row in range(rows)])
    real = torch.arange(length) >= left[:, None]
    ids = ids.masked_fill(~real, 0)
    return {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}


def set_score_biases(model: Any, spread: float) -> None:
    """Gives every router's score-correction bias values between plus and minus `spread`, different by layer."""
    for layer, (name, bias) in enumerate(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            generator = torch.Generator().manual_seed(layer)
            bias.copy_((2 * torch.rand(bias.shape, generator=generator) - 1) * spread)


def pin_experts(model: Any, experts: tuple[int, ...]) -> None:
    """Sends every token to the same experts. The routers' weights stay in use, and in the gradient."""

    def forward_hook(module: torch.nn.Module, args: Any, outputs: Any) -> Any:
        logits, weights, index = outputs
        return logits, weights, torch.tensor(experts, device=index.device).expand_as(index).contiguous()

    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(forward_hook)
