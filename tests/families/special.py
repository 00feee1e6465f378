"""What can't be told from the names of config fields: a row of data for each odd family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.families.shrink import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K

Batch = dict[str, Tensor]
_TALKER = "qwen3_omni_moe/Qwen3OmniMoeTalkerTextExperts"
_THINKER = "qwen3_omni_moe/Qwen3OmniMoeThinkerTextExperts"

# The model class, where the usual preference picks one without these experts or one that can't take text.
MODELS: dict[str, str] = {
    # The one whose encoder and decoder share their experts' weights.
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",  # not its deprecated alias
    _TALKER: "Qwen3OmniMoeTalkerModel",
    _THINKER: "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of text, height and width; the section sums to half the rotated columns of a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}}


# Config fields by family; a dict for a sub-config's own.
CHANGES: dict[str, dict[str, Any]] = {
    # Its attention reads a field that its config class doesn't have; released configs carry it.
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": INTERMEDIATE,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "diffusion_gemma": {"canvas_length": 8, "text_config": {"global_head_dim": 8}},
    "dots1": {"n_shared_experts": 1},
    # Text and vision experts, of different sizes.
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [INTERMEDIATE, 2 * INTERMEDIATE], **_mrope(1, 1, 2)}},
    "gemma4": {"enable_moe_block": True, "global_head_dim": 8, "hidden_size_per_layer_input": 8},
    "glm4v_moe": {"text_config": _mrope(1, 1, 0, partial_rotary_factor=0.5)},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 2 * HIDDEN // 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "granitemoeshared": {"shared_intermediate_size": INTERMEDIATE},
    "granitemoe_swa": {"shared_intermediate_size": INTERMEDIATE},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4_vl": {"text_config": _mrope(2, 1, 1)},
    # The second layer runs twice in one forward, and so do its experts.
    "inkling2_loop": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 4},
    # Experts narrower than the model, between two projections. The audio tower is built, not run.
    "muse_spark": {
        "text_config": {"moe_hidden_size": HIDDEN // 2},
        "audio_config": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    },
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["full_attention", "moe"], "moe_latent_size": HIDDEN // 2},
    "nllb_moe": {"encoder_ffn_dim": INTERMEDIATE, "decoder_ffn_dim": INTERMEDIATE},
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # Its config class lacks a field that the model reads; released configs carry it.
    _TALKER: {"shared_expert_intermediate_size": INTERMEDIATE},
    # Clamps that bite: a shard has to clamp as the whole does.
    "step3p7": {
        "text_config": {
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
            "swiglu_limits": [0.0, 1.0],
            "swiglu_limits_shared": [0.0, 1.0],
        }
    },
    "switch_transformers": {"d_ff": INTERMEDIATE, "decoder_start_token_id": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def _with_vision_tokens(batch: Batch) -> Batch:
    """About every third token goes to the vision experts, without an image; some of each kind in every batch."""
    kinds = (batch["input_ids"] % 3 == 0).int()
    kinds[0, :2] = torch.tensor([0, 1])
    return {**batch, "moe_mm_token_type_ids": kinds}


def _with_canvas(batch: Batch) -> Batch:
    """The decoder refines another sequence than the encoder read."""
    return {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"].flip(1)}


def _with_classes(batch: Batch) -> Batch:
    """Labels are classes of tokens, of which there are 33."""
    return {"input_ids": batch["input_ids"], "labels": batch["labels"] % 33}


def _embedded(batch: Batch) -> Batch:
    """A model without an embedding of its own for text: each token is a fixed random vector."""
    table = torch.randn(256, HIDDEN, generator=torch.Generator().manual_seed(0))
    return {"inputs_embeds": table[batch["input_ids"]]}


# Inputs other than the usual ones.
INPUTS: dict[str, Callable[[Batch], Batch]] = {
    "diffusion_gemma": _with_canvas,
    "ernie4_5_vl_moe": _with_vision_tokens,
    "openai_privacy_filter": _with_classes,
    _TALKER: _embedded,
}

# Experts that never get a gradient, by a pattern of their names, and why.
DEAD: dict[str, tuple[str, str]] = {
    "longcat_flash": (r"gate_up_proj\[[4-7]\]", "rows of gate_up_proj for identity experts, which use no weights"),
    "nllb_moe": (
        r"expert_[23]\.",
        "transformers 5.24 passes the router's one-hot mask as if it held indices, so experts 0 and 1 get every token",
    ),
}

# Families that can't be built tiny, and why.
NOT_TINY: dict[str, str] = {}
