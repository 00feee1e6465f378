"""`generate()` and `eval()` on sharded experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher
from tests.models import VOCABULARY
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

RECIPE = Recipe(changes=(("use_cache", True),))


def _prompt(data_rank: int) -> torch.Tensor:
    """A prompt `[1, length]` of a length of its own."""
    generator = torch.Generator().manual_seed(data_rank)
    return torch.randint(1, VOCABULARY, (1, 3 + 2 * data_rank), generator=generator)


def _settings(data_rank: int) -> dict[str, Any]:
    """Greedy, with an end of its own: the first ranks are done long before the last."""
    return {"do_sample": False, "max_new_tokens": 2 + 4 * data_rank, "pad_token_id": 0}


def generate(layout: Layout) -> list[int]:
    """What this rank generates for its prompt."""
    engine = make_engine(RECIPE, layout)
    engine.eval()
    data_rank = dist.get_rank() // layout.tp
    # A caller's own False must not lead to a hang either.
    tokens = engine.module.generate(_prompt(data_rank).to(engine.device), synced_gpus=False, **_settings(data_rank))
    engine.destroy()
    return tokens[0].tolist()


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(world=4, etp=2, ep=2, stage=1),
        Layout(world=4, tp=2, etp=4, stage=1),
        Layout(world=4, tp=2, etp=2, stage=1),
        Layout(world=4, tp=2, etp=2, ep=2, stage=3),
    ],
    ids=str,
)
def test_prompts_of_different_length(launcher: Launcher, layout: Layout) -> None:
    """Ranks of one expert group generate different lengths; each gets the unsharded model's tokens."""
    results = launcher.run(4, generate, layout=layout)
    model = RECIPE.model().eval()
    for rank, tokens in enumerate(results):
        data_rank = rank // layout.tp
        expected = model.generate(_prompt(data_rank), **_settings(data_rank))[0].tolist()
        assert tokens == expected


def evaluate(layout: Layout) -> float:
    """The loss of a batch in eval mode, without gradients."""
    engine = make_engine(Recipe(), layout)
    engine.eval()
    batch = Recipe().batch(0, 0, 0)
    with torch.no_grad():
        loss = engine(**batch).loss.item()
    engine.destroy()
    return loss


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_eval(launcher: Launcher, stage: int) -> None:
    """All ranks evaluate the same batch. 1e-6: the same sums in another order, in fp32."""
    losses = launcher.run(4, evaluate, layout=Layout(world=4, tp=2, etp=4, stage=stage))
    with torch.no_grad():
        expected = Recipe().model().eval()(**Recipe().batch(0, 0, 0)).loss.item()
    assert losses == pytest.approx([expected] * 4, rel=1e-6)
