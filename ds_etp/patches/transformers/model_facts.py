"""The planner's model facts, counted from the model itself on the meta device (transformers 5.0 to 5.24)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from ds_etp.config.tp_plan import module_pattern
from ds_etp.errors import ConfigError
from ds_etp.experts.layout import ExpertsLayout
from ds_etp.experts.registry import find_experts, read_layout
from ds_etp.patches.deepspeed.autotp import drop_expert_entries
from ds_etp.patches.deepspeed.ulysses import sequence_obstacle
from ds_etp.patches.transformers.experts_interface import experts_per_token
from ds_etp.patches.transformers.meta_models import build_on_meta
from ds_etp.planner.model import ModelFacts, Sharding, Weight

# Styles of tp_plans that AutoTP (deepspeed 0.19.8) splits a layer by, and others it takes; a tp_plan that names any
# other it refuses.
_SPLIT_STYLES = ("colwise", "colwise_rep", "colwise_gather_output", "rowwise")
_KNOWN_STYLES = (*_SPLIT_STYLES, "replicated_with_grad_allreduce", "embedding_rowwise")


def count_model(values: Mapping[str, Any], source: str, name: str) -> ModelFacts:
    """The facts of the causal language model that a config describes. Weights are on the meta device.

    AutoTP splits what the model's tp_plan names. A model it refuses, or with tied embeddings, is planned
    with tp 1.

    Args:
        values: the parsed `config.json`.
        source: where they are from, for messages.
        name: what to call the model.

    Raises:
        ConfigError: transformers doesn't build it, it has no experts or ones ds_etp can't split, or its layers'
            experts differ.
    """
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:  # a config can be wrong in as many ways as there are families
        raise ConfigError(f"{source}: transformers cannot read this config ({error}).") from None
    model: Any = build_on_meta(config, source)
    modules = find_experts(model)
    if not modules:
        raise ConfigError(f"{source}: no layer has routed experts, so there is nothing to split.")
    layouts = {path: read_layout(path, module) for path, module in modules.items()}
    first_path, first = next(iter(layouts.items()))
    if any(_sizes(layout) != _sizes(first) for layout in layouts.values()):
        raise ConfigError(f"{source}: the experts of its layers differ in size, which the planner has no terms for.")
    text = config.get_text_config()
    full_plan = drop_expert_entries(_tp_plan(model), layouts)
    tp_plan = {pattern: style for pattern, style in full_plan.items() if style in _SPLIT_STYLES}
    widths = _widths(model, layouts, first.hidden_size)
    weights = _weights(model, layouts, tp_plan, text.num_hidden_layers)
    no_pp = _no_pp(model, text.num_hidden_layers, tied=bool(text.tie_word_embeddings))
    heads = getattr(text, "num_attention_heads", None)
    return ModelFacts(
        name=name,
        hidden=first.hidden_size,
        vocab=text.vocab_size,
        layers=text.num_hidden_layers,
        moe_layer_indices=tuple(_layer_index(path) for path in layouts) if not no_pp else tuple(range(len(layouts))),
        experts=first.num_experts,
        per_token=experts_per_token(modules[first_path], first.num_experts),
        columns=first.intermediate_size,
        gated=any("gate" in parameter for parameter in first.parameters),
        saved_expert_tensors=_saved_expert_tensors(first),
        router_fp32=True,  # in some families; where it isn't so this is a little too much, as it should be
        norms_fp32=True,
        attention_width=widths.attention,
        output_width=widths.output,
        norm_width=0,  # norms inside attention have no usual names; they are a few percent
        dense_columns=widths.dense,
        shared_columns=widths.shared,
        splits_attention=_splits_attention(tp_plan),
        splits_dense=any(pattern.endswith((".mlp.up_proj", ".feed_forward.up_proj")) for pattern in tp_plan),
        splits_shared=any("shared_expert" in pattern for pattern in tp_plan),
        dense_splits=float(sum(style == "rowwise" for style in tp_plan.values())),
        tp_divides=_tp_divides(model, tp_plan),
        heads=heads or 1,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads or 1,
        weights=weights,
        no_tp=_no_tp(full_plan, tied=bool(text.tie_word_embeddings)),
        no_cp=sequence_obstacle(model),
        no_pp=no_pp,
        spare_experts=first.spare_experts,
    )


def _sizes(layout: ExpertsLayout) -> tuple[int, ...]:
    return layout.num_experts, layout.hidden_size, layout.intermediate_size, layout.spare_experts


def _tp_plan(model: Any) -> dict[str, str]:
    """Patterns of module paths to styles: of the base model, and what its class adds."""
    return {**(getattr(model.config, "base_model_tp_plan", None) or {}), **(type(model)._tp_plan or {})}


def _no_tp(tp_plan: Mapping[str, str], *, tied: bool) -> str:
    if tied:
        return "its embedding is its output layer"
    unknown = sorted({style for style in tp_plan.values() if style not in _KNOWN_STYLES})
    if unknown:
        return f"AutoTP refuses its plan, which has {', '.join(unknown)}"
    return "" if tp_plan else "it has no tensor-parallel plan"


def _style(path: str, tp_plan: Mapping[str, str]) -> str | None:
    """How a module is split; a pattern may leave out leading parts of its path."""
    for pattern, style in tp_plan.items():
        if module_pattern(pattern).fullmatch(path):
            return style
    return None


def _no_pp(model: Any, layers: int, *, tied: bool) -> str:
    """Why the model can't be cut into stages of layers; empty where it can."""
    if tied:
        return "its embedding is its output layer"
    found = [_layer_of(path) for path, _ in model.named_parameters()]
    numbers = [int(number) for number in found if number.isdecimal()]
    # One list of all layers, with something before and after it.
    if sorted(set(numbers)) != list(range(layers)) or numbers != sorted(numbers):
        return f"its {layers} layers are not one list"
    return ""


def _weights(
    model: Any, layouts: Mapping[str, ExpertsLayout], tp_plan: Mapping[str, str], layers: int
) -> tuple[Weight, ...]:
    counted: dict[tuple[Any, ...], list[int]] = {}
    layer_index = -1  # what has no number is before the first layer or after the last
    for full_name, parameter in model.named_parameters():
        path, _, own = full_name.rpartition(".")
        number = _layer_of(full_name)
        layer_index = int(number) if number.isdecimal() else -1 if layer_index == -1 else layers
        sharding: Sharding = "whole"
        if path in layouts:
            sharding = "experts" if layouts[path].parameters[own].dim is not None else "expert rows"
        else:
            style = _style(path, tp_plan)
            if style is not None and not (style == "rowwise" and own == "bias"):
                sharding = "tp"
        label = re.sub(r"\.\d+\.", ".*.", full_name)
        multiplied = parameter.dim() > 1 and "embed" not in path and not label.endswith("bias")
        counted.setdefault((label, parameter.numel(), sharding, multiplied), []).append(layer_index)
    return tuple(
        weight
        for (label, elements, sharding, multiplied), layer_indices in counted.items()
        for weight in _by_layer(label, elements, sharding, multiplied, layer_indices)
    )


def _by_layer(
    label: str, elements: int, sharding: Sharding, multiplied: bool, layer_indices: list[int]
) -> Iterator[Weight]:
    """Weights of one size; layers that have as many of them are in one."""
    by_count: dict[int, list[int]] = {}
    for layer_index, count in Counter(layer_indices).items():
        by_count.setdefault(count, []).append(layer_index)
    for count, layers in by_count.items():
        yield Weight(label, elements, tuple(layers), sharding, multiplied, count)


def _saved_expert_tensors(layout: ExpertsLayout) -> int:
    """Tensors of I columns an expert keeps: as many as in families of its kind, clamped gates of gpt_oss included."""
    gated = any("gate" in name for name in layout.parameters)
    biased = any(parameter.dim is None for parameter in layout.parameters.values())
    return (7 if biased else 4) if gated else 2


# What families call attention's projections and the first of an MLP.
_INPUTS = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj", "qkv_proj", "query_key_value")
_OUTPUTS, _MLP = ("o_proj", "out_proj", "dense"), ("up_proj", "w3")


@dataclass(frozen=True)
class _Widths:
    """Widths that decide on activations, as in `ModelFacts`."""

    attention: int
    output: int
    dense: int
    shared: int


def _widths(model: Any, layouts: Mapping[str, ExpertsLayout], hidden: int) -> _Widths:
    """By the usual names of projections, else as in plain attention."""
    with_experts = {_layer_of(path) for path in layouts}
    inputs: dict[str, int] = {}
    output = dense = shared = 0
    for path, module in model.named_modules():
        own = path.rpartition(".")[2]
        if not isinstance(module, torch.nn.Linear):
            continue
        if own in _INPUTS:
            inputs[own] = max(inputs.get(own, 0), module.out_features)
        elif own in _OUTPUTS and "attn" in path:
            output = max(output, module.in_features)
        elif own in _MLP and _layer_of(path) in with_experts:
            shared = max(shared, module.out_features)
        elif own in _MLP:
            dense = max(dense, module.out_features)
    return _Widths(sum(inputs.values()) or 3 * hidden, output or hidden, dense, shared)


def _layer_index(path: str) -> int:
    return int(_layer_of(path))


def _layer_of(path: str) -> str:
    """The number of the layer a module is in."""
    return path.rpartition(".layers.")[2].partition(".")[0]


def _splits_attention(tp_plan: Mapping[str, str]) -> bool:
    return any(".self_attn." in pattern for pattern in tp_plan)


def _tp_divides(model: Any, tp_plan: Mapping[str, str]) -> tuple[int, ...]:
    """Sizes of the dimensions AutoTP splits, and the heads that share one of them."""
    sizes: set[int] = set()
    for path, module in model.named_modules():
        style = _style(path, tp_plan)
        if style and isinstance(module, torch.nn.Linear):
            sizes.add(module.in_features if style == "rowwise" else module.out_features)
    text = model.config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads") if _splits_attention(tp_plan) else ()
    heads = (getattr(text, name, None) for name in names)
    return (*sorted(sizes), *(count for count in heads if isinstance(count, int)))
