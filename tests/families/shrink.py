"""A small config for any family: sizes are recognised by the names of the config's fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

VOCABULARY = 96
EXPERTS = 4
TOP_K = 2
HIDDEN = 32
# grouped_mm wants rows of 16 bytes: I / etp * 4 bytes, for etp up to 4.
INTERMEDIATE = 16
# Special tokens stay out of the batches' range.
SPECIAL_TOKEN = VOCABULARY - 1

Rule = int | float | bool | Callable[[Any], Any]


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda default: default if default is None else min(default, limit)


# The first pattern that matches a whole field name decides. A callable gets the field's default.
_RULES: list[tuple[str, Rule]] = [
    (r".*(dropout|pdrop|layerdrop|jitter|drop_path).*", lambda default: default and type(default)(0)),
    (r"output_router_logits", True),
    (r"router_aux_loss_coef|aux_loss_coef|moe_loss_weight", 0.05),
    (r"use_cache|use_mamba_kernels", False),
    (r"(unpadded_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"(pad|bos|eos|sep|eod)_token_id", lambda default: None if default is None else 1),
    (r".*token_(id|index)", lambda default: None if default is None else SPECIAL_TOKEN),
    # experts
    (r"(moe_)?num_(local_)?experts|n_routed_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", TOP_K),
    (r"n_group|num_expert_group|topk_group", lambda default: default and 1),
    (r"(moe_)?(n|num)_shared_experts", lambda default: default and 1),
    (r"moe_intermediate_size|expert_ffn_hidden_size", INTERMEDIATE),
    (r"hc_lowrank|router_hidden_size", 16),
    (r".*shared.*intermediate_size|share_expert_dim", lambda default: default and INTERMEDIATE),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", _at_most(1)),
    (r"decoder_sparse_step|moe_layer_interval|num_sparse_(en|de)coder_layers|encoder_sparse_step", 1),
    (r"mlp_only_layers", lambda default: []),
    (r"swiglu_limit", 1.0),  # so that clamps bite
    # A norm over next to nothing (the first tokens of linear attention) would blow roundings up to differences.
    (r".*norm_eps(ilon)?", 1e-2),
    # depth and width
    (r"num_hidden_layers|n_layers|num_layers|(num_)?(en|de)coder_layers|depth", 2),
    (r"num_nextn_predict_layers|num_mtp_layers", lambda default: default and 0),
    (r"hidden_size|d_model|text_hidden_size|out_hidden_size", HIDDEN),
    (r"(dense_|prefix_dense_)?intermediate_size(_mlp)?|d_ff|ffn_hidden_size|(en|de)coder_ffn_dim|mlp_dim", 64),
    (r"(.*_)?num_attention_heads|n_heads|num_heads|(en|de)coder_attention_heads|index_n_heads", 4),
    (r"(.*_)?num_key_value_heads|kv_n_heads", lambda default: default and 4),
    (r"(linear_|mamba_)?(num|n)_(key_|value_|global_key_value_)?heads|linear_num_(key|value)_heads", 4),
    (r"(swa_|index_|mamba_)?head_dim|kv_channels|d_kv|.*_head_dim|mamba_d_head", lambda default: default and 8),
    (r"(q|kv|o)_lora_rank|.*_rank", lambda default: default and 16),
    (r"mamba_d_state|ssm_state_size", 8),
    (r"sliding_window(_size)?|attention_chunk_size", lambda default: default and 64),
    (r"max_position_embeddings|max_seq_len", 64),
    # towers for images and sound: built, not run
    (r"projector_hidden_size|projection_(hidden_dim|intermediate_size)|downsample_hidden_size", HIDDEN),
    (r"output_(channels|dim)|position_embedding_size|max_image_size", 64),
    (r"downsample_channels", lambda default: [64, 64]),
]


def shrink(config_class: Any, changes: dict[str, Any]) -> Any:
    """A small config.

    Args:
        config_class: a config class of transformers.
        changes: values of fields that the rules get wrong; a dict for a sub-config's own.
    """
    return config_class(**_small_fields(config_class, changes))


def _small_fields(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: field.default for name, field in config_class.__dataclass_fields__.items()}
    small = {name: _shrunk(name, default) for name, default in defaults.items() if _rule(name) is not None}
    if "intermediate_size" in small and not {"moe_intermediate_size", "expert_ffn_hidden_size"} & set(small):
        small["intermediate_size"] = INTERMEDIATE  # the experts' own
    for name, spec in config_class.sub_configs_defaults.items():
        own = changes.get(name, {})
        small[name] = {"model_type": spec.model_type, **_small_fields(_sub_config_class(spec), own)}
    small |= _layer_lists(config_class, small)
    return small | {name: value for name, value in changes.items() if name not in config_class.sub_configs_defaults}


def _rule(name: str) -> Rule | None:
    return next((rule for pattern, rule in _RULES if re.fullmatch(pattern, name)), None)


def _shrunk(name: str, default: Any) -> Any:
    rule = _rule(name)
    return rule(default) if callable(rule) else rule


def _sub_config_class(spec: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    return CONFIG_MAPPING[spec.model_type] if spec.config_class is AutoConfig else spec.config_class


def _layer_lists(config_class: Any, small: dict[str, Any]) -> dict[str, list[Any]]:
    """One entry a layer: the full model's first and last, so that each kind of layer is there."""
    fields = [name for name in config_class.__dataclass_fields__ if name.endswith(("layer_types", "indexer_types"))]
    if not fields or small.get("num_hidden_layers") != 2:
        return {}
    full = config_class()
    lists = {name: getattr(full, name) for name in fields}
    return {name: [value[0], value[-1]] for name, value in lists.items() if isinstance(value, list) and value}
