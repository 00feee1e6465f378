"""What reading and editing hold in memory, what ranks that part are told, and engines of other kinds."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_etp
from ds_etp.errors import CheckpointError
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.parameters.runs import differing, named, read, weights_of
from tests.pipeline.lm_runs import Case, Padded
from tests.pipeline.lm_runs import make_engine as make_pipeline
from tests.sharded import Layout, make_engine

# A layer's fused gate and up are two thirds of it, and far larger than anything else.
CHANGES = (("num_hidden_layers", 3), ("intermediate_size", 256), ("num_local_experts", 8))
LARGEST = 8 * 2 * 256 * 32 * 4


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is on, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._seen:
                continue

            def gone(_: Any, key: int = key, size: int = size) -> None:
                self.now -= size
                del self._seen[key]

            self._seen[key] = weakref.ref(storage, gone)
            self.now += size
            self.peak = max(self.peak, self.now)
        return result


def peaks(layout: Layout) -> dict[str, float]:
    """The most that was alive beside the engine, in parts of the largest parameter."""
    engine = make_engine(Recipe(dp=layout.dp, changes=CHANGES), layout)
    found = {}
    with LiveBytes() as count:
        for _, tensor in ds_etp.full_parameters(engine):
            del tensor
    found["read"] = count.peak / LARGEST
    with LiveBytes() as count, ds_etp.edit_parameters(engine) as parameters:
        for _, tensor in parameters:
            if tensor is not None:
                tensor.mul_(2)
            del tensor
    found["edit"] = count.peak / LARGEST
    engine.destroy()
    return found


@pytest.mark.parametrize("layout", [Layout(2, etp=2, stage=2), Layout(4, ep=2, stage=3)], ids=named)
def test_one_whole_parameter_at_a_time(launcher: Launcher, layout: Layout) -> None:
    """The whole, this rank's shard and one more shard; the model is 4.5 times the largest parameter."""
    for found in launcher.run(layout.world, peaks, layout=layout):
        assert 1 <= found["read"] <= 2.1 and found["edit"] <= 2.6, found


def part(how: str) -> str:
    """What a rank is told where one leaves the loop otherwise than the others; and whether the engine still works."""
    engine = make_engine(Recipe(), Layout(2, etp=2, stage=1))
    error: Exception | None = None
    try:
        with ds_etp.edit_parameters(engine) as parameters:
            for place, _ in enumerate(parameters):
                if place == 2 and dist.get_rank() == 1:
                    if how == "raise":
                        raise KeyError("mine")
                    break
    except (KeyError, CheckpointError) as raised:
        error = raised
    assert differing(read(engine), weights_of(Recipe().model())) == []
    engine.destroy()
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("how", ["raise", "break"])
def test_ranks_that_part(launcher: Launcher, how: str) -> None:
    """Nobody waits for the one that left."""
    first, second = launcher.run(2, part, how=how)
    left = "raised" if how == "raise" else "left the loop"
    assert f"rank 0 went on to the next; rank 1 {left}" in first
    assert "mine" in second if how == "raise" else second == first


def other_engines() -> list[str]:
    """An engine without the block, and tied embeddings, which come once."""
    recipe = Recipe(changes=(("tie_word_embeddings", True),))
    engine = make_engine(recipe, Layout(2, stage=2, with_block=False))
    wanted = weights_of(recipe.model())
    wrong = differing(read(engine), wanted)
    with ds_etp.edit_parameters(engine) as parameters:
        for _, tensor in parameters:
            if tensor is not None:
                tensor.mul_(2)
    wrong += differing(read(engine), {name: weight * 2 for name, weight in wanted.items()})
    engine.destroy()
    return wrong


def test_engine_without_the_block(launcher: Launcher) -> None:
    assert launcher.run(2, other_engines) == [[], []]


def pipelined() -> list[str]:
    """Two stages whose experts are cut, and embeddings that both hold."""
    recipe = Padded("mixtral", changes=(("tie_word_embeddings", True), ("output_router_logits", False)))
    engine = make_pipeline(recipe, Case(Layout(4, etp=2, stage=1)))
    wanted = dict(sorted(weights_of(recipe.model()).items()))
    wrong = differing(dict(sorted(read(engine).items())), wanted)
    to_last = {name: tensor for name, tensor in read(engine, to_rank=3).items() if tensor is not None}
    wrong += differing(dict(sorted(to_last.items())), wanted) if dist.get_rank() == 3 else list(to_last)
    with ds_etp.edit_parameters(engine, modifier_rank=3) as parameters:
        for _, tensor in parameters:
            if tensor is not None:
                tensor.mul_(2)
    doubled = {name: weight * 2 for name, weight in wanted.items()}
    wrong += differing(dict(sorted(read(engine).items())), doubled)
    tied = [p for name, p in engine.module.named_parameters() if name.startswith("tied_modules")]
    wrong += ["tied"] * (
        not all(torch.equal(p.detach(), doubled["model.embed_tokens.weight"]) for p in tied if p.shape == (96, 32))
    )
    engine.destroy()
    return wrong


def test_pipeline(launcher: Launcher) -> None:
    """From any stage to any rank; what two stages share is changed in both."""
    assert launcher.run(4, pipelined) == [[]] * 4
