"""Experts modules: what is found in a model, how its layout is read, and what is refused.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import use_experts_implementation

from ds_etp.errors import ConfigError
from ds_etp.experts.layout import ExpertsLayout, ParameterLayout, SizeKind, UnsupportedExperts, full_shape
from ds_etp.experts.registry import find_experts, read_layout
from ds_etp.parallel.topology import Topology

STANDARD = {
    "gate_up_proj": ParameterLayout((4, 16, 16), dim=1, fused_chunks=2),
    "down_proj": ParameterLayout((4, 16, 8), dim=2),
}
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
        read_layout(path, module)
    return str(info.value)


@pytest.mark.parametrize("etp", [2, 4])
def test_partial_outputs_sum_to_the_whole(etp: int) -> None:
    """The family's own forward on every slice, summed: why the layout is what it is."""
    experts, generator = mixtral_experts().double(), torch.Generator().manual_seed(1)
    experts.config._experts_implementation = "eager"  # the others have no fp64
    x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    index = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]])
    weights = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    layout = read_layout("experts", experts)
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
        layout = read_layout(path, module)
        sizes: dict[str, SizeKind] = {"num_experts": "experts", "intermediate_dim": "intermediate"}
        assert layout == ExpertsLayout(4, 16, 8, STANDARD, sizes=sizes)
    assert state(model) == before


def test_sizes_come_from_the_weights_not_the_config() -> None:
    experts = mixtral_experts()
    experts.num_experts, experts.intermediate_dim = 77, 77
    assert read_layout("experts", experts).num_experts == 4


def test_partitioned_parameters_are_read_by_their_full_shape() -> None:
    """ZeRO-3 leaves an empty tensor behind, and the shape in `ds_shape`."""
    experts = mixtral_experts()
    for parameter in experts.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert full_shape(experts.down_proj) == (4, 16, 8)
    assert read_layout("experts", experts).intermediate_size == 8


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        (
            "gpt_oss",  # transposed, gate and up interleaved, biases
            {
                "gate_up_proj": ParameterLayout((4, 16, 16), dim=2),
                "gate_up_proj_bias": ParameterLayout((4, 16), dim=1),
                "down_proj": ParameterLayout((4, 8, 16), dim=1),
                "down_proj_bias": ParameterLayout((4, 16), dim=None),
            },
        ),
        (
            "aria_text",  # transposed, gate and up concatenated
            {
                "gate_up_proj": ParameterLayout((4, 16, 16), dim=2, fused_chunks=2),
                "down_proj": ParameterLayout((4, 8, 16), dim=1),
            },
        ),
        (
            "nemotron_h",  # no gate
            {"up_proj": ParameterLayout((4, 8, 16), dim=1), "down_proj": ParameterLayout((4, 16, 8), dim=2)},
        ),
        (
            "llama4_text",
            {
                "gate_up_proj": ParameterLayout((4, 16, 16), dim=2, fused_chunks=2),
                "down_proj": ParameterLayout((4, 8, 16), dim=1),
            },
        ),
        (
            "longcat_flash",  # rows of identity experts, which no one uses
            {
                "gate_up_proj": ParameterLayout((6, 16, 16), dim=1, fused_chunks=2, experts=(4, 2)),
                "down_proj": ParameterLayout((4, 16, 8), dim=2),
            },
        ),
    ],
)
def test_other_layouts_are_read_too(family: str, parameters: dict[str, ParameterLayout]) -> None:
    path, module = next(iter(find_experts(build(family)).items()))
    layout = read_layout(path, module)
    assert layout.parameters == parameters
    assert (layout.num_experts, layout.hidden_size, layout.intermediate_size) == (4, 16, 8)


def test_interleaving_is_found_where_no_flag_says_so() -> None:
    """transformers before 5.8."""
    module = next(iter(find_experts(build("gpt_oss")).values()))
    del module.is_concatenated
    assert read_layout("experts", module).parameters["gate_up_proj"].fused_chunks == 1
    module = mixtral_experts()
    del module.is_concatenated
    assert read_layout("experts", module).parameters == STANDARD


# Refusing


@pytest.mark.parametrize(
    ("family", "path", "name", "reason"),
    [
        ("dbrx", "transformer.blocks.0.ffn.experts", "DbrxExperts", "the rows of all experts in one matrix"),
        ("jetmoe", "model.layers.0.mlp.input_linear", "JetMoeParallelExperts", "one projection of experts"),
    ],
)
def test_a_family_that_cannot_be_split(family: str, path: str, name: str, reason: str) -> None:
    model = build(family)
    before = state(model)
    found = find_experts(model)
    assert path in found, "a family that is not found would be a silent no-op"
    text = refusal(found[path], path)
    assert text.startswith(f"expert_tensor_parallel cannot split {path} ({name}): ")
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


def with_gate(function: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """A change to one module: a class with another gate function."""

    def change(module: Any) -> None:
        module.__class__ = type("OwnGateExperts", (type(module),), {"_apply_gate": lambda self, x: function(x)})

    return change


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
        (with_attribute("has_bias", True), "down_proj, down_proj_bias, gate_up_proj, gate_up_proj_bias are known"),
        (with_attribute("has_gate", False), "down_proj, up_proj are known"),
        (with_attribute("is_transposed", True), "(4, 16, 8) don't fit together"),
        (with_attribute("is_concatenated", False), "gives something else on a part of the columns"),
        (with_attribute("has_post_expert_norm", True), "a norm follows each expert's down projection"),
        (with_attribute("_is_expert_parallel", True), "transformers has split its experts already"),
        (with_attribute("forward", replaced_forward), "its forward was replaced on the instance"),
        (with_gate(lambda x: x.chunk(2, -1)[0].softmax(-1)), "gives something else on a part of the columns"),
        (with_gate(lambda x: x.view(-1, 16)), "doesn't run on a part of the columns"),
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


@use_experts_implementation
class NextYearsExperts(nn.Module):
    """What a newer transformers may bring: a flag whose meaning no one knows yet."""

    def __init__(self, config: Any, **flags: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 16, 16))
        self.down_proj = nn.Parameter(torch.zeros(4, 16, 8))
        self.act_fn = nn.SiLU()
        for name, value in flags.items():
            setattr(self, name, value)

    def forward(self, *_: Tensor) -> Tensor:
        """Never called."""
        raise AssertionError


@pytest.mark.parametrize("flag", ["is_block_diagonal", "has_expert_norm"])
@pytest.mark.parametrize("value", [True, False])
def test_a_flag_that_no_one_knows_is_refused_whatever_it_says(flag: str, value: bool) -> None:
    assert read_layout("experts", NextYearsExperts(None)).parameters == STANDARD
    assert f"an unknown layout flag {flag}={value}, newer than this ds_etp" in refusal(
        NextYearsExperts(None, **{flag: value})
    )


def test_every_reason_is_listed() -> None:
    module = mixtral_experts()
    module.has_post_expert_norm = module._is_expert_parallel = True
    text = refusal(module)
    assert "a norm follows" in text and "; transformers has split" in text


def test_a_list_of_experts_is_refused_with_the_way_out() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    found = find_experts(model)
    assert list(found) == ["experts"]
    text = refusal(found["experts"])
    assert "a list of 4 modules" in text and "ds_etp.fuse_experts" in text


def test_parts_of_experts_are_not_found_again() -> None:
    model = nn.Module()
    model.experts = nn.ModuleDict({"experts": nn.Linear(2, 2), "0": nn.Linear(2, 2)})
    assert list(find_experts(model)) == ["experts"]


def test_a_module_without_parameters_holds_no_experts() -> None:
    model = nn.Module()
    model.experts = nn.Identity()
    assert find_experts(model) == {}
