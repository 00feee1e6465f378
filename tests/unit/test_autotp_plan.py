"""AutoTP's plan without experts: over the tensor-parallel plan of every MoE config that transformers ships.

Only configs are made, no model: plans are class attributes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.tensor_parallel import config as host
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_etp.patches.deepspeed.autotp import dense_tp_plan, drop_expert_entries

Plan = dict[str, str]


def _plans() -> dict[str, Plan]:
    """The plan of each model type whose plan names routed experts."""
    plans = {name: getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None) or {} for name in CONFIG_MAPPING}
    return {name: plan for name, plan in plans.items() if any(map(is_module_entry, plan))}


def is_module_entry(pattern: str) -> bool:
    """Whether a pattern's own last name is that of a routed experts module."""
    return pattern.rpartition(".")[2] == "experts"


def is_expert_entry(pattern: str) -> bool:
    """Whether a pattern is about routed experts, by the names transformers gives them: told apart from the code."""
    return "experts" in pattern.split(".")


def paths(plan: Plan, prefix: str) -> list[str]:
    """Where the experts modules of a plan's model are, in layers 3 and 12."""
    return [
        prefix + pattern.replace("*", layer) for pattern in plan if is_module_entry(pattern) for layer in ["3", "12"]
    ]


DISPATCHERS = _plans()
PREFIXES = ["", "model.", "model.language_model."]


def test_the_walk_finds_the_families() -> None:
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "llama4_text", "nemotron_h", "gemma4_text"} <= set(DISPATCHERS)
    assert len(DISPATCHERS) > 50


@pytest.mark.parametrize("prefix", PREFIXES, ids=["bare", "model", "multimodal"])
@pytest.mark.parametrize("family", DISPATCHERS)
def test_only_expert_entries_go(family: str, prefix: str) -> None:
    plan = DISPATCHERS[family]
    kept = drop_expert_entries(plan, paths(plan, prefix))
    assert kept == {pattern: style for pattern, style in plan.items() if not is_expert_entry(pattern)}
    assert list(kept) == [pattern for pattern in plan if pattern in kept], "the order is kept"


@pytest.mark.parametrize("family", DISPATCHERS)
def test_only_expert_entries_go_from_the_merged_plan(family: str) -> None:
    """As DeepSpeed merges it: the config's, the class's (lm_head), and the instance's, which names `model.` too."""
    plan = DISPATCHERS[family]
    config_class = type("Config", (), {"base_model_tp_plan": plan})
    model_class = type("Model", (), {"_tp_plan": {"lm_head": "colwise_gather_output"}})
    model: Any = model_class()
    model.config = config_class()
    model._tp_plan = {f"model.{pattern}": style for pattern, style in plan.items()}
    merged = host._get_hf_tp_plan(model)
    expected = {pattern: style for pattern, style in merged.items() if not is_expert_entry(pattern)}
    assert set(expected) < set(merged)
    assert "lm_head" in expected
    original = host._get_hf_tp_plan
    with dense_tp_plan(model, paths(plan, "model.")):
        assert host._get_hf_tp_plan(model) == expected
    assert host._get_hf_tp_plan is original


@pytest.mark.parametrize("family", DISPATCHERS)
def test_nothing_goes_for_other_modules(family: str) -> None:
    """Names near those of experts are about other modules: a shared expert, a gate, another layer's projection."""
    plan = {pattern: style for pattern, style in DISPATCHERS[family].items() if not is_expert_entry(pattern)}
    assert drop_expert_entries(plan, paths(DISPATCHERS[family], "model.")) == plan


PATTERN_CASES = [
    # pattern, whether it goes for experts at model.layers.3.mlp.experts
    ("layers.*.mlp.experts", True),
    ("layers.*.mlp.experts.gate_up_proj", True),
    ("layers.*.mlp.experts.down_proj", True),
    ("model.layers.*.mlp.experts.down_proj", True),
    ("mlp.experts.gate_up_proj", True),
    ("layers.3.mlp.experts", True),
    ("layers.12.mlp.experts", False),
    ("layers.*.mlp.gate", False),
    ("layers.*.mlp.gate_proj", False),
    ("layers.*.mlp.up_proj", False),
    ("layers.*.mlp.down_proj", False),
    ("layers.*.mlp.shared_experts", False),
    ("layers.*.mlp.shared_experts.down_proj", False),
    ("layers.*.mlp.shared_expert.gate_proj", False),
    ("layers.*.mlp.experts.gate_up_proj_bias", True),
    ("layers.*.mlp.experts.identity_expert", True),
    ("layers.*.self_attn.q_proj", False),
    ("xlayers.*.mlp.experts", False),  # a prefix is left out at a dot only
    ("layers.*.experts", False),  # a star stands for one name, not for several
    ("layers.*", False),
    ("model.language_model.layers.*.mlp.experts", False),  # longer than the path itself
    ("layersX3.mlp.experts", False),
    ("layers.*.mlp.experts.gate.up_proj", True),
]


@pytest.mark.parametrize(("pattern", "goes"), PATTERN_CASES)
def test_exact_paths(pattern: str, goes: bool) -> None:
    kept = drop_expert_entries({pattern: "colwise"}, ["model.layers.3.mlp.experts"])
    assert (pattern not in kept) is goes


def test_a_dot_in_a_pattern_is_a_dot() -> None:
    assert drop_expert_entries({"mlp.experts": "x"}, ["mlpXexperts"]) == {"mlp.experts": "x"}


def test_multimodal_text_tower_only() -> None:
    """Experts of the text tower go; the vision tower's plan, under its own prefix, stays."""
    plan = {
        "language_model.layers.*.mlp.experts.down_proj": "rowwise",
        "visual.blocks.*.mlp.down_proj": "rowwise",
        "visual.layers.*.mlp.experts.down_proj": "rowwise",
    }
    kept = drop_expert_entries(plan, ["model.language_model.layers.0.mlp.experts"])
    assert list(kept) == ["visual.blocks.*.mlp.down_proj", "visual.layers.*.mlp.experts.down_proj"]


def test_another_models_plan_is_left_alone() -> None:
    plan = {"layers.*.mlp.experts": "moe_tp_experts"}
    config = SimpleNamespace(base_model_tp_plan=plan)
    model, other = SimpleNamespace(config=config), SimpleNamespace(config=config)
    with dense_tp_plan(model, ["layers.0.mlp.experts"]):
        assert host._get_hf_tp_plan(other) == plan
        assert host._get_hf_tp_plan(model) is None  # DeepSpeed's word for no plan: it falls back to its own rules


def test_the_host_is_put_back_after_an_error() -> None:
    original = host._get_hf_tp_plan
    with pytest.raises(KeyError), dense_tp_plan(SimpleNamespace(), []):
        raise KeyError
    assert host._get_hf_tp_plan is original


def test_the_router_style_of_transformers_5_0_is_dropped() -> None:
    """Its tp_plans name the router with a style AutoTP doesn't know; the router stays whole."""
    plan = {"layers.*.mlp.gate": "ep_router", "layers.*.mlp.gate_proj": "colwise"}
    assert drop_expert_entries(plan, ["model.layers.0.mlp.experts"]) == {"layers.*.mlp.gate_proj": "colwise"}
