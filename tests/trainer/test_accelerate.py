"""accelerate without Trainer: prepare, save_state, load_state, get_state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_etp
from tests.export.test_live import LIMIT
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, full_tensors, weight
from tests.tolerances import LOSS
from tests.trainer.runs import deepspeed_config, forget_host_state

STEPS = 4


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of a recipe's batches, in the order in which accelerate deals them out."""

    def __init__(self, recipe: Recipe) -> None:
        self.rows = [
            {name: value[row] for name, value in recipe.batch(step, 0, rank).items()}
            for step in range(recipe.steps)
            for rank in range(recipe.dp)
            for row in range(recipe.rows)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def train(recipe: Recipe, layout: Layout, folder: str, resume: bool) -> dict[str, Any]:
    """Trains an ordinary accelerate loop; saves its state half-way, or goes on from there."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    ds_etp.register()
    config = {**deepspeed_config(layout), "gradient_clipping": recipe.clip}
    try:
        model = make_model("mixtral").train()
        # How accelerate is told that there is no GPU, and still uses DeepSpeed.
        PartialState(cpu=True)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        loader = torch.utils.data.DataLoader(Batches(recipe), batch_size=recipe.rows)
        model, optimizer, loader = accelerator.prepare(model, recipe.make_optimizer(model.parameters()), loader)
        if resume:
            accelerator.load_state(folder)
        losses, norms, seen = [], [], []
        for step, batch in enumerate(loader):
            if resume and step < STEPS // 2:
                continue
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            norms.append(float(model.get_global_grad_norm()))
            seen.append(int(batch["input_ids"].sum()))
            if not resume and step == STEPS // 2 - 1:
                accelerator.save_state(folder)
        weights = full_tensors(model, weight)
        state = accelerator.get_state_dict(model)
        if dist.get_rank() == 0:
            assert set(state) == set(weights)
            assert all(torch.equal(state[name], weights[name]) for name in weights)
        else:
            assert state is None
        model.destroy()
        return {"losses": losses, "norms": norms, "seen": seen, "weights": weights}
    finally:
        forget_host_state()


@pytest.mark.sample("zero3")
@pytest.mark.parametrize(
    "layout",
    [Layout(world=2, etp=2, stage=1), Layout(world=4, tp=2, etp=2, ep=2, stage=2), Layout(world=2, etp=2, stage=3)],
    ids=["zero1", "tp2-ep2-zero2", "zero3"],
)
def test_accelerate_alone(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    recipe = Recipe(optimizer="adamw", dp=layout.dp, steps=STEPS)
    arguments = {"recipe": recipe, "layout": layout, "folder": str(tmp_path), "timeout": LIMIT}
    results = launcher.run(layout.world, train, resume=False, **arguments)
    oracle = train_unsharded(recipe)
    assert results[0]["losses"] == pytest.approx(oracle.losses, rel=LOSS)
    assert results[0]["norms"] == pytest.approx(oracle.norms, rel=LOSS)
    # Tensor-parallel peers were dealt the same batches.
    for rank, result in enumerate(results):
        assert result["seen"] == results[rank - rank % layout.tp]["seen"]
    resumed = launcher.run(layout.world, train, resume=True, **arguments)[0]
    assert resumed["losses"] == results[0]["losses"][STEPS // 2 :]
    assert resumed["norms"] == results[0]["norms"][STEPS // 2 :]
    assert all(torch.equal(resumed["weights"][name], value) for name, value in results[0]["weights"].items())
