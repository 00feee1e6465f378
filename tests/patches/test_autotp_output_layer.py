"""Where code reads the output layer's weight instead of calling the layer, tensor parallelism leaves it whole."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
from torch import Tensor

import ds_etp
from ds_etp.patches.deepspeed.autotp_output_layer import reads_output_weight
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, make_engine, train, with_options
from tests.tolerances import assert_equal_runs
from tests.variants import with_fused_loss


@pytest.mark.parametrize(("tied", "stage"), [(False, 1), (True, 3), (True, 0)])
def test_a_fused_loss_equals_one_process(launcher: Launcher, tied: bool, stage: int) -> None:
    layout = Layout(world=4, tp=2, etp=2, stage=stage)
    recipe = Recipe(dp=2, variant="fused loss", changes=(("tie_word_embeddings", tied),))
    assert_equal_runs(launcher.run(4, train, recipe=recipe, layout=layout)[0], train_unsharded(recipe))


def held(recipe: Recipe, layout: Layout) -> tuple[int, ...]:
    """The shape of a rank's output layer."""
    engine = make_engine(recipe, layout)
    shape = tuple(engine.module.lm_head.weight.shape)
    engine.destroy()
    return shape


def test_the_key_decides_over_the_forward(launcher: Launcher) -> None:
    layout = Layout(world=2, tp=2, etp=2)
    whole = with_options(layout, etp_size=2, replicate_lm_head=True)
    assert launcher.run(2, held, recipe=Recipe(), layout=layout) == [(48, 32)] * 2
    assert launcher.run(2, held, recipe=Recipe(), layout=whole) == [(96, 32)] * 2


def refused(recipe: Recipe, layout: Layout) -> str:
    """The error of an engine."""
    with pytest.raises(ds_etp.ConfigError) as error:
        make_engine(recipe, layout)
    return str(error.value)


def test_a_split_that_is_asked_for(launcher: Launcher) -> None:
    """DeepSpeed's loss over parts of the vocabulary, and a forward that reads the whole weight."""
    layout = Layout(world=2, tp=2, etp=2, extra=(("tensor_parallel", {"vocab_parallel_lm_head": True}),))
    for message in launcher.run(2, refused, recipe=Recipe(variant="fused loss"), layout=layout):
        assert "tensor_parallel.vocab_parallel_lm_head=True" in message and "tests.variants" in message


def asks_for_the_dtype(self: Any, input_ids: Tensor) -> Any:
    return self.lm_head(self.model(input_ids).last_hidden_state.to(self.lm_head.weight.dtype))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_which_forward_reads(family: str) -> None:
    """Transformers' own doesn't, nor does one that asks for the dtype; a wrapped one does."""
    model = make_model(family)
    assert reads_output_weight(model) is None
    model.forward = types.MethodType(asks_for_the_dtype, model)
    assert reads_output_weight(model) is None
    with_fused_loss(model)
    inner = model.forward

    @functools.wraps(type(model).forward)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.forward = types.MethodType(outer, model)
    assert "with_fused_loss" in (reads_output_weight(model) or "")


def test_peft_and_trl() -> None:
    """TRL's own patch of a model, also under an adapter."""
    trl = pytest.importorskip("trl.trainer.utils", reason="trl is not among the requirements")
    peft = pytest.importorskip("peft", reason="peft is not among the requirements")
    model = make_model("mixtral")
    trl.add_fused_lm_head(model)
    assert "_fused_forward" in (reads_output_weight(model) or "")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert "_fused_forward" in (reads_output_weight(adapted) or "")
