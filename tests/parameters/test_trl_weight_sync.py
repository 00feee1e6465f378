"""The tensors that TRL would send to vLLM, from split models, against TRL's own iterator on the unsharded model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.errors import ConfigError
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.parameters.runs import differing, named, read, weights_of
from tests.peft.models import BOTH, EXPERTS
from tests.sharded import Layout, make_engine

pytest.importorskip("trl", reason="trl is not among the requirements: pip install trl, then this runs")

FULL = [
    Layout(2, etp=2, stage=0),
    Layout(2, ep=2, stage=1),
    Layout(4, tp=2, etp=2, stage=2),
    Layout(4, tp=2, ep=2, stage=3),
]
ADAPTED = [
    Layout(2, etp=2, stage=0),
    Layout(4, tp=2, etp=2, ep=2, stage=2),
    Layout(4, etp=2, stage=3),
    Layout(2, tp=2, etp=2, stage=3, dtype="bf16"),
]


def generation(model: Any, mode: str = "colocate") -> Any:
    """TRL's object without the vLLM that its constructor starts."""
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    made = object.__new__(VLLMGeneration)
    made.model, made.mode = model, mode
    made._dist = DistributedBackend(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None)))
    return made


def sent(model: Any, mode: str = "colocate") -> dict[str, Tensor]:
    """What the iterator yields, as it is at that moment."""
    return {name: tensor.detach().clone() for name, tensor in generation(model, mode)._iter_named_params()}


def sync(recipe: Recipe, layout: Layout) -> list[str]:
    """What a rank would have sent wrong, in both of TRL's modes, and what was left changed."""
    import trl.generation.vllm_generation  # noqa: F401 - as a trainer of TRL does before it has an engine

    engine = make_engine(recipe, layout)
    dtype = torch.bfloat16 if layout.dtype == "bf16" else torch.float32
    unsharded = recipe.model().to(dtype)
    start = weights_of(unsharded, dtype)
    wanted = sent(unsharded)
    wrong = differing(sent(engine.module), wanted)
    served = sent(engine.module, "server")
    if dist.get_rank() == 0:
        wrong += differing(served, wanted)
    else:
        facts = [(name, tensor.dtype, tensor.shape) for name, tensor in served.items()]
        wrong += ["facts"] * (facts != [(name, tensor.dtype, tensor.shape) for name, tensor in wanted.items()])
        wrong += [name for name, tensor in served.items() if not tensor.is_meta]
    wrong += differing(read(engine), start)
    engine.destroy()
    return wrong


@pytest.mark.parametrize("layout", FULL, ids=named)
def test_full_models(launcher: Launcher, layout: Layout) -> None:
    """The same names, in the same order, and the same bits."""
    recipe = Recipe(family="qwen3_moe", dp=layout.dp)
    assert launcher.run(layout.world, sync, recipe=recipe, layout=layout) == [[]] * layout.world


@pytest.mark.parametrize("layout", ADAPTED, ids=named)
def test_merged_adapters(launcher: Launcher, layout: Layout) -> None:
    """PEFT's own sums on whole tensors: the same bits, and the engine's weights as they were."""
    recipe = replace(BOTH, dp=layout.dp)
    assert launcher.run(layout.world, sync, recipe=recipe, layout=layout) == [[]] * layout.world


def other_ways() -> list[str]:
    """What was found wrong with a head trained beside the original, with merged adapters and with names."""
    recipe = replace(EXPERTS, options=(("modules_to_save", ("lm_head",)),))
    engine = make_engine(recipe, Layout(2, etp=2, stage=1))
    unsharded = recipe.model()
    wanted = sent(unsharded)
    wrong = differing(read(engine, merge_adapters=True), wanted)
    name = "model.layers.1.mlp.experts.down_proj"
    wrong += differing(read(engine, merge_adapters=True, names=[name]), {name: wanted[name]})
    engine.module.merge_adapter()
    merged = read(engine)[f"base_model.model.{name.replace('.down', '.base_layer.base_layer.down')}"]
    assert merged is not None
    wrong += differing(read(engine, merge_adapters=True, names=[name]), {name: merged})  # not merged twice
    with pytest.raises(ConfigError, match="names='lm_head' is not a parameter of this model"):
        read(engine, names="lm_head")
    with pytest.raises(ConfigError, match="to_rank=2 is not one of the 2 ranks"):
        read(engine, to_rank=2)
    engine.destroy()
    return wrong


def test_further_copies_and_names(launcher: Launcher) -> None:
    """The copy that is in use, under the original's name; adapters merged before; arguments that are wrong."""
    assert launcher.run(2, other_ways) == [[], []]


def own_sync() -> str:
    """What a trainer with a sync of its own says, of a split model; it does nothing of the kind to others."""
    from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer

    engine = make_engine(Recipe(), Layout(2, etp=2, stage=1))
    trainer = object.__new__(OnlineDPOTrainer)
    trainer.model = engine.module
    with pytest.raises(ConfigError) as info:
        trainer._move_model_to_vllm()
    trainer.model = Recipe().model()
    with pytest.raises(AttributeError):  # TRL's own, which asks for more than this trainer has
        trainer._move_model_to_vllm()
    engine.destroy()
    return str(info.value)


def test_trainers_with_a_sync_of_their_own(launcher: Launcher) -> None:
    """They would send shards as if they were the experts' parameters."""
    pytest.importorskip("trl.experimental.online_dpo.online_dpo_trainer")
    for text in launcher.run(2, own_sync):
        assert text.startswith("use_vllm=True sends vLLM the parameters that a rank holds, shards of the experts")
        assert "Values that work: false. Trainers that sync by VLLMGeneration work with TRL 1.11 to 1.16." in text
