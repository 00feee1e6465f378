"""Experts modules: what is found in a model, how it is sliced and put together again, and what is refused.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_etp.errors import ConfigError
from ds_etp.layouts import ExpertsLayout, ParameterLayout, UnsupportedExperts, find_experts, full_shape, read_layout
from ds_etp.patches.experts_interface import default_gate
from ds_etp.topology import Topology

GATE_UP = ParameterLayout(dim=1, parts=2)
DOWN = ParameterLayout(dim=2)

_DENSE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
}
_MOE = {**_DENSE, "num_experts_per_tok": 2}
_LATENT_ATTENTION = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DENSE),
    "mixtral": ("MixtralConfig", {**_MOE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_MOE,
            **_LATENT_ATTENTION,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 8,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**_MOE, "num_local_experts": 4, "head_dim": 8, "rope_parameters": None}),
    "llama4_text": ("Llama4TextConfig", {**_MOE, "num_local_experts": 4, "intermediate_size_mlp": 8, "head_dim": 8}),
    "dbrx": (
        "DbrxConfig",
        {
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 1,
            "vocab_size": 32,
            "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_MOE,
            "layers_block_type": ["moe"],
            "n_routed_experts": 4,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 8,
            "mamba_num_heads": 2,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 4,
        },
    ),
    "jetmoe": ("JetMoeConfig", {**_MOE, "num_local_experts": 4, "kv_channels": 8}),
    "aria_text": ("AriaTextConfig", {**_MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **_LATENT_ATTENTION,
            "vocab_size": 32,
            "hidden_size": 16,
            "num_layers": 1,
            "num_attention_heads": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "ffn_hidden_size": 8,
            "expert_ffn_hidden_size": 8,
        },
    ),
}


def build(family: str) -> nn.Module:
    """A tiny model of a family, random weights."""
    name, values = CONFIGS[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{key: value for key, value in values.items() if value is not None})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def mixtral_experts() -> Any:
    """The experts module of one layer."""
    return next(iter(find_experts(build("mixtral")).values()))


def state(model: nn.Module) -> dict[str, Any]:
    """What splitting a model would change: classes, plain attributes, the parameters and their values."""
    classes = {path: type(module) for path, module in model.named_modules()}
    attributes = {path: sorted(vars(module)) for path, module in model.named_modules()}
    parameters = {name: (id(p), p.data_ptr(), tuple(p.shape)) for name, p in model.named_parameters()}
    return {"classes": classes, "attributes": attributes, "parameters": parameters}


def refusal(module: nn.Module, path: str = "model.layers.3.mlp.experts") -> str:
    """The message a module is refused with."""
    with pytest.raises(UnsupportedExperts) as info:
        read_layout(path, module, default_gate())
    return str(info.value)


# Slicing


def test_gate_and_up_are_sliced_half_each() -> None:
    gate_up = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23]).view(1, 8, 1)  # gate 1x, up 2x; I is 4
    topology = Topology(2, etp=2)
    assert GATE_UP.shard(gate_up, topology, 0, 0).flatten().tolist() == [10, 11, 20, 21]
    assert GATE_UP.shard(gate_up, topology, 0, 1).flatten().tolist() == [12, 13, 22, 23]


def test_down_is_sliced_by_columns() -> None:
    down = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]]).view(1, 2, 4)  # H is 2
    topology = Topology(2, etp=2)
    assert DOWN.shard(down, topology, 0, 0).tolist() == [[[10, 11], [20, 21]]]
    assert DOWN.shard(down, topology, 0, 1).tolist() == [[[12, 13], [22, 23]]]


def test_ep_takes_neighbouring_experts() -> None:
    full = torch.arange(4).view(4, 1, 1).expand(4, 2, 1)
    topology = Topology(2, ep=2)
    assert GATE_UP.shard(full, topology, 0, 0)[:, 0, 0].tolist() == [0, 1]
    assert GATE_UP.shard(full, topology, 1, 0)[:, 0, 0].tolist() == [2, 3]


sizes = st.integers(1, 4)


@settings(max_examples=200, deadline=None)
@given(ep=sizes, etp=sizes, experts=sizes, hidden=sizes, columns=sizes, gated=st.booleans())
def test_round_trip(ep: int, etp: int, experts: int, hidden: int, columns: int, gated: bool) -> None:
    topology = Topology(ep * etp, ep=ep, etp=etp)
    intermediate = columns * etp
    shape = (experts * ep, 2 * intermediate, hidden) if gated else (experts * ep, hidden, intermediate)
    layout = GATE_UP if gated else DOWN
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [[layout.shard(full, topology, i, j) for j in range(etp)] for i in range(ep)]
    own = (experts, 2 * columns, hidden) if gated else (experts, hidden, columns)
    assert all(shard.shape == own for row in shards for shard in row)
    # Every element is in exactly one shard, and goes back to its place.
    assert torch.equal(torch.cat([shard.flatten() for row in shards for shard in row]).sort().values, full.flatten())
    assert torch.equal(layout.unshard(shards), full)


@pytest.mark.parametrize("shape", [(0, 4, 2), (4, 4, 0)], ids=["no experts", "no hidden"])
def test_empty_parameters_go_round_too(shape: tuple[int, ...]) -> None:
    topology, full = Topology(4, ep=2, etp=2), torch.zeros(shape)
    shards = [[GATE_UP.shard(full, topology, i, j) for j in range(2)] for i in range(2)]
    assert GATE_UP.unshard(shards).shape == shape


@pytest.mark.parametrize("etp", [2, 4])
def test_partial_outputs_sum_to_the_whole(etp: int) -> None:
    """The family's own forward on every slice, summed: why the layout is what it is."""
    experts, generator = mixtral_experts().double(), torch.Generator().manual_seed(1)
    experts.config._experts_implementation = "eager"  # the others have no fp64
    x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    index = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]])
    weights = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    layout = read_layout("experts", experts, default_gate())
    full = {name: parameter.data for name, parameter in experts.named_parameters()}
    with torch.no_grad():
        whole = experts(x, index, weights)
        total = torch.zeros_like(whole)
        for place in range(etp):
            for name, parameter in experts.named_parameters():
                parameter.data = layout.parameters[name].shard(full[name], Topology(etp, etp=etp), 0, place)
            total += experts(x, index, weights)
    # fp64: the same sums in another order, a rounding is 1e-16.
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-14)


# Finding and reading


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("llama", []),
        ("mixtral", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        ("qwen3_moe", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        ("qwen2_moe", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),  # not mlp.shared_expert
        ("deepseek_v3", ["model.layers.1.mlp.experts"]),  # not mlp.shared_experts; layer 0 is dense
    ],
)
def test_find_and_read(family: str, paths: list[str]) -> None:
    model = build(family)
    before = state(model)
    found = find_experts(model)
    assert list(found) == paths
    for path, module in found.items():
        assert module is model.get_submodule(path)
        layout = read_layout(path, module, default_gate())
        assert layout == ExpertsLayout(4, 16, 8, {"gate_up_proj": GATE_UP, "down_proj": DOWN})
    assert state(model) == before


def test_sizes_come_from_the_weights_not_the_config() -> None:
    experts = mixtral_experts()
    experts.num_experts, experts.intermediate_dim = 77, 77
    assert read_layout("experts", experts, default_gate()).num_experts == 4


def test_partitioned_parameters_are_read_by_their_full_shape() -> None:
    """ZeRO-3 leaves an empty tensor behind, and the shape in `ds_shape`."""
    experts = mixtral_experts()
    for parameter in experts.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert full_shape(experts.down_proj) == (4, 16, 8)
    assert read_layout("experts", experts, default_gate()).intermediate_size == 8


# Refusing

NO_FLAGS = "it carries none of transformers' layout flags (no use_experts_implementation)"


@pytest.mark.parametrize(
    ("family", "path", "name", "reasons"),
    [
        (
            "gpt_oss",
            "model.layers.0.mlp.experts",
            "GptOssExperts",
            ["experts with biases (has_bias=True)", "transposed expert weights", "interleaved gate and up weights"],
        ),
        ("llama4_text", "model.layers.0.feed_forward.experts", "Llama4TextExperts", [NO_FLAGS]),
        ("dbrx", "transformer.blocks.0.ffn.experts", "DbrxExperts", [NO_FLAGS]),
        (
            "nemotron_h",
            "model.layers.0.mixer.experts",
            "NemotronHExperts",
            ["experts without a gate (has_gate=False)", "its parameters are down_proj, up_proj"],
        ),
        ("jetmoe", "model.layers.0.mlp.input_linear", "JetMoeParallelExperts", [NO_FLAGS]),
        ("aria_text", "model.layers.0.mlp.experts", "AriaExperts", ["transposed expert weights (is_transposed=True)"]),
        ("longcat_flash", "model.layers.0.mlp.experts", "LongcatFlashExperts", [NO_FLAGS]),
    ],
)
def test_a_family_that_is_not_understood(family: str, path: str, name: str, reasons: list[str]) -> None:
    model = build(family)
    before = state(model)
    found = find_experts(model)
    assert path in found, "a family that is not found would be a silent no-op"
    text = refusal(found[path], path)
    assert text.startswith(f"expert_tensor_parallel cannot split {path} ({name}): ")
    for reason in reasons:
        assert reason in text
    assert text.endswith("No layer of this model was changed.")
    assert state(model) == before


def test_a_refusal_is_a_config_error() -> None:
    assert issubclass(UnsupportedExperts, ConfigError)


def replaced_forward(*_: Any) -> Tensor:
    """Stands for a hook of accelerate or a kernel."""
    raise AssertionError("never called")


def with_attribute(name: str, value: Any) -> Callable[[Any], None]:
    """A change to one module: an instance attribute."""
    return lambda module: setattr(module, name, value)


def with_gate(module: Any) -> None:
    """A class with a gate of its own, which might mix columns."""
    own = type("OwnGateExperts", (type(module),), {"_apply_gate": lambda self, gate_up: gate_up})
    module.__class__ = own


def with_parameter(name: str, shape: tuple[int, ...]) -> Callable[[Any], None]:
    """A change to one module: a parameter more, or another shape."""
    return lambda module: setattr(module, name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            with_attribute("is_rotated", True),
            "an unknown layout flag is_rotated=True, newer than this ds_etp",
        ),
        (with_attribute("has_bias", True), "experts with biases (has_bias=True)"),
        (with_attribute("has_gate", False), "experts without a gate (has_gate=False)"),
        (with_attribute("is_transposed", True), "transposed expert weights (is_transposed=True)"),
        (with_attribute("is_concatenated", False), "interleaved gate and up weights (is_concatenated=False)"),
        (with_attribute("has_post_expert_norm", True), "a norm after the down projection (has_post_expert_norm=True)"),
        (with_attribute("_is_expert_parallel", True), "experts that transformers has split already"),
        (with_attribute("forward", replaced_forward), "its forward was replaced on the instance"),
        (with_gate, "a gate function of its own (_apply_gate)"),
        (with_parameter("scale", (4,)), "its parameters are down_proj, gate_up_proj, scale"),
        (with_parameter("gate_up_proj", (4, 14, 16)), "(4, 14, 16) and down_proj (4, 16, 8) don't fit together"),
        (with_parameter("gate_up_proj", (3, 16, 16)), "(3, 16, 16) and down_proj (4, 16, 8) don't fit together"),
        (with_parameter("down_proj", (0,)), "gate_up_proj (4, 16, 16) and down_proj (0,) don't fit together"),
        (with_parameter("gate_up_proj", (0,)), "gate_up_proj (0,) and down_proj (4, 16, 8) don't fit together"),
    ],
)
def test_a_module_that_is_not_standard(change: Callable[[Any], None], reason: str) -> None:
    module = mixtral_experts()
    change(module)
    text = refusal(module)
    assert reason in text
    assert f"({type(module).__name__})" in text


def test_every_reason_is_listed() -> None:
    module = mixtral_experts()
    module.has_bias = module.is_transposed = True
    assert re.search(r"experts with biases .*; transposed expert weights ", refusal(module))


def test_parts_of_experts_are_not_found_again() -> None:
    model = nn.Module()
    model.experts = nn.ModuleDict({"experts": nn.Linear(2, 2), "0": nn.Linear(2, 2)})
    assert list(find_experts(model)) == ["experts"]


def test_a_module_without_parameters_holds_no_experts() -> None:
    model = nn.Module()
    model.experts = nn.Identity()
    assert find_experts(model) == {}
