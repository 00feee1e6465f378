"""A model's facts from its `config.json`: exactly, or not at all.

Legend: H hidden size, I intermediate size of an expert, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_etp.config.dense_rules import HEAD_SINKS, HEAD_SIZES
from ds_etp.errors import ConfigError
from ds_etp.planner.families import ALIASES, FAMILIES, Family
from ds_etp.planner.model import ModelFacts, Sharding, Weight


@dataclass(frozen=True)
class _Values:
    """The values of one config file, read by name."""

    values: Mapping[str, object]
    source: str

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        for known in (name, *ALIASES.get(name, ())):
            value = self.values.get(known)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise ConfigError(
                f"{self.source}: {name}={self.values.get(name)!r} is not a size, and the model's parameters can't be "
                f"counted without it. Give the whole config.json, or count the model itself: --exact."
            )
        return default

    def number(self, name: str, default: int = 0) -> int:
        """A whole number that may be 0 or absent."""
        value = self.values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def flag(self, name: str | bool, default: bool = False) -> bool:
        """A boolean of the config, or a fixed answer."""
        return bool(self.values.get(name, default)) if isinstance(name, str) else name


def read_facts(values: Mapping[str, object], source: str, name: str = "") -> ModelFacts:
    """The facts of a model from its config's values.

    Args:
        values: the parsed `config.json`.
        source: where they are from, for messages.
        name: what to call the model.

    Raises:
        ConfigError: a family that isn't known to be counted exactly, or a size that is missing.
    """
    model_type = str(values.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"{source}: model_type={model_type!r} is not a family whose parameters are counted from its config alone. "
            f"Families that are: {', '.join(sorted(FAMILIES))}. Others are counted from the model: --exact."
        )
    return _facts(_Values(values, source), family, name or model_type)


def _facts(config: _Values, family: Family, name: str) -> ModelFacts:
    hidden, layers, vocab = (config.size(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    experts, columns = config.size(family.experts), config.size(family.columns)
    dense_layer_indices = _dense_layer_indices(config, family, layers)
    every = tuple(range(layers))
    moe_layer_indices = tuple(index for index in every if index not in dense_layer_indices)
    if not moe_layer_indices:
        raise ConfigError(f"{config.source}: none of the {layers} layers has experts, so there is nothing to split.")
    tied = config.flag("tie_word_embeddings", family.tied)
    norm = 2 * hidden if family.layer_norm_bias else hidden
    attention = _heads(config, family, every) if family.attention == "heads" else _latent(config, family, every)
    before, after = (-1,), (layers,)
    weights = [
        Weight("embedding", vocab * hidden, before, "whole", multiplied=tied),
        *([] if tied else [Weight("output layer", vocab * hidden, after, "tp")]),
        *_extra("output bias", vocab, after, "tp", config.flag(family.head_bias)),
        Weight("norms", norm, every, "whole", multiplied=False, each=2),
        Weight("last norm", norm, after, "whole", multiplied=False),
        *attention.weights,
        *_experts(hidden, columns, experts, moe_layer_indices, family),
    ]
    sizes = [vocab] if not tied else []
    dense = config.size("intermediate_size") if dense_layer_indices else 0
    shared = _shared_columns(config, family, columns)
    splits = float("attention" in family.splits)
    for label, width, layer_indices, part in (
        ("dense MLP", dense, dense_layer_indices, "dense"),
        ("shared experts", shared, moe_layer_indices, "shared"),
    ):
        split = part in family.splits
        if width:
            weights.append(Weight(label, hidden * width, layer_indices, "tp" if split else "whole", each=3))
            sizes += [width] if split else []
            splits += len(layer_indices) / layers if split else 0
    if family.shared_gate:
        weights.append(Weight("shared gate", hidden, moe_layer_indices, "whole"))
    return ModelFacts(
        name=name,
        hidden=hidden,
        vocab=vocab,
        layers=layers,
        moe_layer_indices=moe_layer_indices,
        experts=experts,
        per_token=min(config.size(family.per_token), experts),
        columns=columns,
        gated=True,
        saved_expert_tensors=family.saved_expert_tensors,
        router_fp32=family.router_fp32,
        norms_fp32=family.norms_fp32,
        attention_width=attention.width,
        output_width=attention.output,
        norm_width=attention.normed,
        dense_columns=dense,
        shared_columns=shared,
        splits_attention="attention" in family.splits,
        splits_dense="dense" in family.splits,
        splits_shared="shared" in family.splits,
        dense_splits=splits,
        tp_divides=(*sizes, *(attention.heads if "attention" in family.splits else ())),
        heads=attention.heads[0],
        key_value_heads=attention.heads[-1],
        weights=tuple(weights),
        no_tp=family.no_tp or _tied(tied),
        no_cp=HEAD_SINKS if family.sinks else HEAD_SIZES if family.attention == "latent" else "",
        no_pp=_tied(tied),
    )


def _tied(tied: bool) -> str:
    return "its embedding is its output layer" if tied else ""


@dataclass(frozen=True)
class _Attention:
    """One layer's attention: its weights, counts of heads, and the widths of what it keeps for backward."""

    weights: list[Weight]
    heads: tuple[int, ...]
    width: int
    output: int
    normed: int


def _heads(config: _Values, family: Family, every: tuple[int, ...]) -> _Attention:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    groups = config.size("num_key_value_heads", heads)
    size = config.size("head_dim", family.head_dim or hidden // heads)
    queries, keys = heads * size, groups * size
    sharding: Sharding = "tp" if "attention" in family.splits else "whole"
    qkv_bias = config.flag(family.qkv_bias, family.biased)
    output_bias = config.flag(family.output_bias, family.biased)
    norms = _head_norms(config, family)
    weights = [
        Weight("queries", hidden * queries, every, sharding),
        Weight("keys", hidden * keys, every, sharding),
        Weight("values", hidden * keys, every, sharding),
        Weight("attention output", queries * hidden, every, sharding),
        *_extra("query bias", queries, every, sharding, qkv_bias),
        *_extra("key bias", keys, every, sharding, qkv_bias),
        *_extra("value bias", keys, every, sharding, qkv_bias),
        *_extra("attention output bias", hidden, every, "whole", output_bias),
        # A norm over all heads (OLMoE) is as wide as the hidden size, whatever head_dim is.
        *_extra("query norm", size if norms == "head" else hidden, every, "whole", norms != "none"),
        *_extra("key norm", size if norms == "head" else hidden // heads * groups, every, "whole", norms != "none"),
        *_extra("sinks", heads, every, "whole", family.sinks),
    ]
    return _Attention(weights, (heads, groups), queries + 2 * keys, queries, 0 if norms == "none" else queries + keys)


def _head_norms(config: _Values, family: Family) -> Literal["none", "head", "all"]:
    if family.head_norms == "use_qk_norm":
        return "head" if config.flag("use_qk_norm") else "none"
    return family.head_norms


def _latent(config: _Values, family: Family, every: tuple[int, ...]) -> _Attention:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    rope, plain, value = (config.size(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    latent, query_rank = config.size("kv_lora_rank"), config.number("q_lora_rank")
    queries, bias = heads * (plain + rope), config.flag(family.output_bias)
    sharding: Sharding = "tp" if "attention" in family.splits else "whole"
    weights = [
        Weight("keys and values, down", hidden * (latent + rope), every, "whole"),
        Weight("keys and values, norm", latent, every, "whole", multiplied=False),
        Weight("keys and values, up", latent * heads * (plain + value), every, sharding),
        Weight("attention output", heads * value * hidden, every, sharding),
        *_extra("keys and values, bias", latent + rope, every, "whole", bias),
        *_extra("attention output bias", hidden, every, "whole", bias),
    ]
    if query_rank:
        weights += [
            Weight("queries, down", hidden * query_rank, every, "whole"),
            Weight("queries, norm", query_rank, every, "whole", multiplied=False),
            Weight("queries, up", query_rank * queries, every, sharding),
            *_extra("queries, bias", query_rank, every, "whole", bias),
        ]
    else:
        weights.append(Weight("queries", hidden * queries, every, sharding))
    width = 2 * queries + heads * value + query_rank + latent
    return _Attention(weights, (heads,), width, heads * value, query_rank + latent)


def _experts(hidden: int, columns: int, experts: int, layers: tuple[int, ...], family: Family) -> list[Weight]:
    return [
        Weight("router", experts * hidden, layers, "whole"),
        *_extra("router bias", experts, layers, "whole", family.router_bias),
        Weight("experts, gate and up", experts * 2 * columns * hidden, layers, "experts"),
        Weight("experts, down", experts * columns * hidden, layers, "experts"),
        *_extra("experts, gate and up bias", experts * 2 * columns, layers, "experts", family.expert_bias),
        *_extra("experts, down bias", experts * hidden, layers, "expert rows", family.expert_bias),
    ]


def _extra(name: str, elements: int, layers: tuple[int, ...], sharding: Sharding, present: bool) -> list[Weight]:
    return [Weight(name, elements, layers, sharding, multiplied=False)] if present else []


def _shared_columns(config: _Values, family: Family, columns: int) -> int:
    if family.shared == "n_shared_experts":
        return config.number(family.shared) * columns
    return config.size(family.shared) if family.shared else 0


def _dense_layer_indices(config: _Values, family: Family, layers: int) -> tuple[int, ...]:
    """The layers without experts."""
    if family.dense == "first":
        return tuple(range(min(config.number("first_k_dense_replace"), layers)))
    if family.dense == "listed":
        listed = config.values.get("mlp_only_layers") or ()
        step = config.size("decoder_sparse_step", 1)
        only = {index for index in listed if isinstance(index, int)} if isinstance(listed, list | tuple) else set()
        return tuple(index for index in range(layers) if index in only or (index + 1) % step != 0)
    return ()
