"""A language model cut into stages trains as it does in one piece, and a stage holds no more than its own."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_etp
from tests.launcher import Launcher
from tests.models import make_batch, make_model
from tests.oracle import train_unsharded
from tests.pipeline.lm_runs import Case, Padded, make_engine, train
from tests.sharded import Layout
from tests.tolerances import LOSS, assert_equal_runs

TIED = (("tie_word_embeddings", True),)
WINDOW = (("sliding_window", 4),)
FOUR_LAYERS = (("num_hidden_layers", 4),)
NOT_ROUTED = (("output_router_logits", False),)

PLAIN = Layout(world=2, with_block=False)
CASES = {
    "sliding window, tied": (Case(PLAIN), Padded("mixtral", changes=(*WINDOW, *TIED))),
    "two kinds of masks, own positions": (
        Case(PLAIN, options=(("inputs", ("input_ids", "attention_mask", "position_ids")),)),
        Padded("gpt_oss", changes=(*WINDOW, *NOT_ROUTED), positions=True),
    ),
    "shared experts, a dense layer, ep 2": (Case(Layout(world=4, ep=2)), Padded("deepseek_v3")),
    "data parallel, checkpointed": (
        Case(Layout(world=4, with_block=False), options=(("activation_checkpoint_interval", 1),)),
        Padded("qwen3_moe", optimizer="adamw", changes=FOUR_LAYERS),
    ),
    "etp 2, stage 0": (Case(Layout(world=4, etp=2, stage=0)), Padded("mixtral", changes=TIED, optimizer="adamw")),
    "frozen embeddings, checkpointed": (
        Case(Layout(world=4, etp=2), options=(("activation_checkpoint_interval", 2),)),
        Padded("mixtral", changes=FOUR_LAYERS, frozen="dense"),
    ),
    # Lengths differ between steps, and what AutoTP's ranks send in parts has one shape for ever in DeepSpeed.
    "tp 2": (Case(Layout(world=4, tp=2, etp=2)), Padded("mixtral", changes=TIED)),
    "four stages": (
        Case(Layout(world=4, with_block=False), 4, (("partition_method", "type:DecoderLayer"),)),
        Padded("mixtral", changes=FOUR_LAYERS),
    ),
}


@pytest.mark.sample(
    "two kinds of masks, own positions",
    "shared experts, a dense layer, ep 2",
    "frozen embeddings, checkpointed",
    "tp 2",
    "four stages",
)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_whole_model(launcher: Launcher, name: str) -> None:
    case, recipe = CASES[name]
    recipe = replace(recipe, dp=case.dp)
    run = launcher.run(case.layout.world, train, recipe=recipe, case=case)[0]
    assert_equal_runs(run, train_unsharded(recipe))


def look_at_a_stage() -> dict[str, Any]:
    """What one of two stages keeps, and how it evaluates."""
    model = make_model("qwen3_moe", **dict(FOUR_LAYERS))
    whole = make_model("qwen3_moe", **dict(FOUR_LAYERS)).eval()
    config = model.config
    ours = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    modules = [weakref.ref(layer) for layer in model.model.layers]
    module = ds_etp.pipeline.from_causal_lm(model, 2)
    gc.collect()
    alive = {name for name, parameter in ours.items() if parameter() is not None}
    named = {}
    for name, parameter in module.named_parameters():
        prefix = max((key for key in module.hf_names if name.startswith(key)), key=len)
        named[module.hf_names[prefix] + name.removeprefix(prefix)] = parameter
    assert set(named) == alive
    assert all(ours[name]() is parameter for name, parameter in named.items())
    assert sum(layer() is not None for layer in modules) == 2
    # What the caller still has of the model holds nothing of other stages.
    assert {id(parameter) for parameter in model.parameters()} <= {id(parameter) for parameter in named.values()}
    assert module.hf_config.output_router_logits and module.hf_config.to_dict() == {
        **config.to_dict(),
        "architectures": ["Qwen3MoeForCausalLM"],
    }

    recipe = Padded("qwen3_moe", changes=FOUR_LAYERS)
    engine = make_engine(recipe, Case(PLAIN))
    with torch.no_grad():
        for length in (5, 12):  # shapes may change from batch to batch
            batch = make_batch(7, 0, length=length, padding=(0, 2))
            expected = whole(**batch)
            loss, logits = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
            assert abs(float(loss) - float(expected.loss)) <= LOSS * float(expected.loss)
            if engine.is_last_stage():
                real = batch["attention_mask"].bool()
                torch.testing.assert_close(logits[0][real], expected.logits[real])
                torch.testing.assert_close(logits[1], expected.aux_loss)
    engine.destroy()
    return {"rank": dist.get_rank(), "names": sorted(named)}


def test_a_stage_holds_its_own_parameters_alone(launcher: Launcher) -> None:
    first, second = launcher.run(2, look_at_a_stage)
    assert not set(first["names"]) & set(second["names"])
    assert {*first["names"], *second["names"]} == {
        name for name, _ in make_model("qwen3_moe", **dict(FOUR_LAYERS)).named_parameters()
    }


def refuse() -> list[str]:
    """What two ranks are told, and a model that is whole afterwards."""
    said = []
    model = make_model("mixtral")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    batch = make_batch(0, 0)
    with torch.no_grad():
        loss = model(**batch).loss
    for arguments in ({"num_stages": 3}, {"num_stages": 2, "inputs": ("input_ids", "token_type_ids")}):
        with pytest.raises(ds_etp.ConfigError) as error:
            ds_etp.pipeline.from_causal_lm(model, **arguments)
        said.append(str(error.value))
    model.gradient_checkpointing_enable()
    with pytest.raises(ds_etp.ConfigError) as error:
        ds_etp.pipeline.from_causal_lm(model, 2)
    said.append(str(error.value))
    model.gradient_checkpointing_disable()
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, loss)
    return said


def test_refusals(launcher: Launcher) -> None:
    told = launcher.run(2, refuse)
    assert told[0] == told[1]
    stages, inputs, checkpointing = told[0]
    assert stages == (
        "from_causal_lm.num_stages=3 must divide the 2 ranks and be no more than the 2 layers. Values that work: 1, 2."
    )
    assert "'token_type_ids'" in inputs
    assert "activation_checkpoint_interval" in checkpointing
