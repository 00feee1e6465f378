"""Parameters counted from a config equal those of the model transformers builds from it, to the element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_etp.errors import ConfigError
from ds_etp.experts.registry import find_experts
from ds_etp.parallel.topology import Topology
from ds_etp.patches.transformers.model_facts import count_model
from ds_etp.planner.configs import read_facts
from ds_etp.planner.families import FAMILIES
from ds_etp.planner.memory import elements
from ds_etp.planner.model import ModelFacts
from tests.planner.configs import PUBLISHED, values_of

# What a family's config lacks by itself.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v3": {"num_experts_per_tok": 8},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 16, "n_shared_experts": 2},
}
BIASES = {"attention_bias": True, "lm_head_bias": True, "use_qk_norm": True}
DENSE = {"first_k_dense_replace": 2, "mlp_only_layers": [1], "decoder_sparse_step": 2}
OTHER = {"qkv_bias": False, "q_lora_rank": None, "head_dim": 48}


def on_meta(values: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    return model


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_exactly(name: str) -> None:
    model, facts = on_meta(values_of(name)), read_facts(values_of(name), name)
    assert facts.parameters == count(model)
    experts = find_experts(model)
    assert len(experts) == facts.moe_layers
    assert elements(facts, Topology(1), expert=True) == sum(map(count, experts.values()))


@pytest.mark.parametrize("changes", [{}, BIASES, DENSE, OTHER], ids=["plain", "biases", "dense", "other"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_exactly(family: str, changes: dict[str, Any]) -> None:
    own = dict(changes)
    if family in ("deepseek_v2", "deepseek_v3"):
        own.pop("head_dim", None)  # of no meaning there, and transformers refuses it
    values = {"model_type": family, "num_hidden_layers": 4, **NEEDED.get(family, {}), **own}
    config = AutoConfig.for_model(**values).to_dict() | own
    assert read_facts(config, family).parameters == count(on_meta(values))


SHORT = {name: values_of(name) | {"num_hidden_layers": 4} for name in PUBLISHED} | {
    family: {"model_type": family, "num_hidden_layers": 4, "first_k_dense_replace": 1, **NEEDED.get(family, {})}
    for family in FAMILIES
}


@pytest.mark.parametrize("name", SHORT)
def test_counting_the_model_agrees(name: str) -> None:
    """The two ways to a model's facts: what is split, how, and what each token is multiplied by."""
    values = SHORT[name]
    whole = AutoConfig.for_model(**values).to_dict() | values
    read, counted = read_facts(whole, name), count_model(values, name, name)
    assert bool(read.no_tp) == bool(counted.no_tp)
    topologies = [Topology(16, etp=4, ep=2)]
    if not read.no_tp:
        topologies += [Topology(16, tp=4, etp=4, ep=2), Topology(8, tp=2, etp=2, ep=4)]
    for topology in topologies:
        for kind in (False, True):
            assert elements(read, topology, expert=kind) == elements(counted, topology, expert=kind)
    assert read.active_parameters == counted.active_parameters
    same = ("hidden", "vocab", "layers", "moe_layers", "experts", "per_token", "columns", "gated", "output_width")
    for field in (*same, "dense_columns", "shared_columns"):
        assert getattr(read, field) == getattr(counted, field), field
    takes = [[tp for tp in range(1, 65) if facts.takes_tp(tp)] for facts in (read, counted)]
    assert takes[0] == takes[1]
    if not read.no_tp:
        assert read.splits_attention == counted.splits_attention


def test_models_of_other_families_are_counted() -> None:
    values = AutoConfig.for_model("granitemoe", num_hidden_layers=2, num_local_experts=4).to_dict()
    with pytest.raises(ConfigError, match=r"here: model_type='granitemoe' .* --exact"):
        read_facts(values, "here")
    facts = count_model(values, "here", "granite")
    assert facts.parameters == count(on_meta(values))
    assert (facts.experts, facts.moe_layers) == (4, 2)


def test_models_that_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="no layer has routed experts"):
        count_model({"model_type": "llama", "num_hidden_layers": 1}, "here", "llama")
    with pytest.raises(ConfigError, match="transformers cannot"):
        count_model({"model_type": "no such family"}, "here", "none")
    with pytest.raises(ConfigError, match="none of the 2 layers has experts"):
        read_facts(values_of("DeepSeek-V3") | {"num_hidden_layers": 2}, "here")


@pytest.mark.parametrize("key", ["hidden_size", "num_local_experts", "vocab_size", "num_attention_heads"])
def test_missing_sizes_are_named(key: str) -> None:
    values = values_of("Mixtral-8x7B-v0.1")
    for wrong in ({}, {key: None}, {key: "many"}, {key: True}, {key: 0}):
        with pytest.raises(ConfigError, match=f"here: {key}="):
            read_facts({name: value for name, value in values.items() if name != key} | wrong, "here")


def test_tied_embeddings_count_once() -> None:
    values = values_of("Qwen3-30B-A3B")
    untied, tied = (read_facts(values | {"tie_word_embeddings": flag}, "here") for flag in (False, True))
    assert untied.parameters - tied.parameters == 151936 * 2048
    assert tied.parameters == count(on_meta(values | {"tie_word_embeddings": True}))
    assert untied.active_parameters == tied.active_parameters  # the output layer is multiplied in both
    assert not tied.takes_tp(2)


def test_active_parameters() -> None:
    """Mixtral-8x7B works with 2 of its 8 experts: 12.9 billion parameters a token, without the embedding 12.7."""
    facts: ModelFacts = read_facts(values_of("Mixtral-8x7B-v0.1"), "here")
    whole = replace(facts, per_token=8)
    assert whole.active_parameters - facts.active_parameters == 32 * 6 * 3 * 4096 * 14336
    assert round(facts.active_parameters / 1e9, 1) == 12.7
