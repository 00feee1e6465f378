"""What doesn't work in a pipeline is refused on all ranks alike, also where only one stage finds it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import ds_etp
from ds_etp.errors import CheckpointError, ConfigError
from tests.half import fp16_supported
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Recipe
from tests.pipeline.models import Decoder, make_pipeline
from tests.sharded import Layout, ds_config


def _model() -> Any:
    return make_model("mixtral", output_router_logits=False)


def _pipeline() -> Any:
    return make_pipeline(_model(), 2)


def _odd_stage() -> Any:
    model = _model()
    config = copy.deepcopy(model.config)
    config.intermediate_size = 17
    model.model.layers[1] = MixtralDecoderLayer(config, 1)
    return make_pipeline(model, 2)


def _idle_stage() -> Any:
    model = _model().requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(True)
    return make_pipeline(model, 2, cuts=(3,))


def _bare(cls: Any = PipelineModule, **arguments: Any) -> Any:
    model = _model()
    return cls([model.model.embed_tokens, model.model.norm, model.lm_head, model.model.norm], **arguments)


def _tied_experts() -> Any:
    model = _model()
    attribute = "layer.mlp.gate.weight"
    tied = [
        TiedLayerSpec("both", Decoder, layer, model.config, tied_weight_attr=attribute) for layer in model.model.layers
    ]
    return PipelineModule([*tied, LayerSpec(Decoder, model.model.layers[0], model.config)], num_stages=2)


_TRANSPOSED = ProcessTopology(axes=["data", "pipe"], dims=[2, 2])
_WITH_MODEL = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
ZERO2 = {"zero_optimization": {"stage": 2}}
TP2 = {"tensor_parallel": {"autotp_size": 2}}
OFFLOAD = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}
# What is built, what is changed in the config, and what the message says.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "one stage": (_odd_stage, {}, "etp_size=2 cannot shard 2.layer.mlp.experts: intermediate size 17"),
    "no experts": (lambda: _bare(num_stages=2), {}, "found no routed experts in any stage"),
    "nothing to train": (_idle_stage, {}, "has no parameter that is trained in stage 1"),
    "tied experts": (_tied_experts, {}, "TiedLayerSpec='both' holds experts"),
    "pp in tiling": (_pipeline, {"expert_tensor_parallel": {"etp_size": 4}}, "etp 4 x ep 1 x pp 2 = 8 does not divide"),
    "ZeRO-2": (_pipeline, ZERO2, "zero_optimization.stage=2 does not work with PipelineModule"),
    "ZeRO-2, one stage": (lambda: _bare(num_stages=1), ZERO2, "stage=2 does not work with"),
    "fp16": (_pipeline, {"fp16": {"enabled": True}}, "fp16.enabled=True was not tried with PipelineModule"),
    "no axis for tp": (_pipeline, TP2, "Values that work: PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)"),
    "no plan for tp": (
        lambda: _bare(topology=_WITH_MODEL),
        TP2,
        "autotp_size=2 needs to know how the pipeline's dense",
    ),
    "offloaded sums": (_pipeline, OFFLOAD, "data_types.grad_accum_dtype='float32' with offload_optimizer"),
    "Ulysses": (_pipeline, {"sequence_parallel_size": 2}, "sequence parallel size=2 does not work"),
    "transposed": (lambda: _bare(topology=_TRANSPOSED), {}, "ProcessTopology' does not lay ranks out"),
    "no tp": (lambda: _bare(topology=_WITH_MODEL), {}, "PipeModelDataParallelTopology' does not lay ranks out"),
    "two stages a rank": (lambda: _bare(DualPipeVModule, num_stages=2), {}, "DualPipeVEngine' was not tried"),
}


@fp16_supported()
def refusals() -> dict[str, str]:
    """What each case says on this rank; and what the module's own writing says, once experts are split."""
    ds_etp.register()
    config = ds_config(Recipe(), Layout(world=4, etp=2))
    said = {}
    for name, (build, changes, _) in CASES.items():
        with pytest.raises(ConfigError) as caught:
            deepspeed.initialize(model=build(), config={**config, **changes})
        said[name] = str(caught.value)
    engine, *_ = deepspeed.initialize(model=_pipeline(), config=config)
    with pytest.raises(CheckpointError, match=r"ds_etp\.save_pretrained"):
        engine.module.save_state_dict("nowhere", None)
    del engine.module.hf_config
    with pytest.raises(CheckpointError, match="no attribute hf_config"):
        engine.save_16bit_model("nowhere")
    engine.destroy()
    return said


def test_refused_on_all_ranks(launcher: Launcher) -> None:
    by_rank = launcher.run(4, refusals)
    assert all(said == by_rank[0] for said in by_rank)
    for name, (_, _, message) in CASES.items():
        assert message in by_rank[0][name], by_rank[0][name]
