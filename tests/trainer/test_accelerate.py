"""accelerate without Trainer: prepare, save_state, load_state, get_state_dict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_etp
from ds_etp.config.block import ExpertTensorParallelConfig, parse_block
from ds_etp.patches.accelerate.auto_values import keep_block_from_accelerate
from tests.export.test_live import LIMIT
from tests.launcher import Launcher
from tests.models import make_model
from tests.oracle import Recipe, train_unsharded
from tests.sharded import Layout, full_tensors, weight, with_options
from tests.tolerances import LOSS
from tests.trainer.runs import AUTO, as_file, deepspeed_config, forget_host_state

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


def train(recipe: Recipe, layout: Layout, folder: str, resume: bool, config_file: bool = False) -> dict[str, Any]:
    """Trains an ordinary accelerate loop; saves its state half-way, or goes on from there.

    The config is a dict, or a file that accelerate's launcher names in the environment.
    """
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    ds_etp.register()
    config: dict[str, Any] | None = {**deepspeed_config(layout), "gradient_clipping": recipe.clip}
    try:
        if config_file:
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = as_file(config, Path(folder))
            config = None
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
            if not resume and step == STEPS // 2 - 1 < recipe.steps - 1:
                accelerator.save_state(folder)
        weights = full_tensors(model, weight)
        expert = next(tuple(p.shape) for name, p in model.named_parameters() if name.endswith("experts.down_proj"))
        state = accelerator.get_state_dict(model)
        if dist.get_rank() == 0:
            assert set(state) == set(weights)
            assert all(torch.equal(state[name], weights[name]) for name in weights)
        else:
            assert state is None
        model.destroy()
        return {"losses": losses, "norms": norms, "seen": seen, "weights": weights, "expert": expert}
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


def test_auto_in_the_block(launcher: Launcher, tmp_path: Path) -> None:
    """`"auto"` is ds_etp's there, accelerate's everywhere else."""
    layout = with_options(Layout(world=2, tp=2, etp=2, stage=2), **AUTO)
    recipe = Recipe(optimizer="adamw", dp=layout.dp, steps=2)
    arguments = {"recipe": recipe, "layout": layout, "folder": str(tmp_path), "timeout": LIMIT}
    result = launcher.run(2, train, resume=False, config_file=True, **arguments)[0]
    assert result["expert"][2] == 16 // 2, "the experts are not split"
    oracle = train_unsharded(recipe)
    assert result["losses"] == pytest.approx(oracle.losses, rel=LOSS)
    assert result["norms"] == pytest.approx(oracle.norms, rel=LOSS)


def test_plugins_made_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered after accelerate has read the file."""
    from accelerate import DeepSpeedPlugin

    block = {"etp_size": "auto", "plan": "auto", "reduce_dtype": "auto"}
    config = {"zero_optimization": {"stage": 1}, "train_batch_size": "auto", "expert_tensor_parallel": block}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    plugin = DeepSpeedPlugin(hf_ds_config=str(tmp_path / "ds.json"))
    # accelerate's own, which may be below the patch: why there is one.
    original = getattr(DeepSpeedPlugin.fill_match, "__wrapped__", DeepSpeedPlugin.fill_match)
    monkeypatch.setattr(DeepSpeedPlugin, "fill_match", original)
    with pytest.raises(ValueError, match=r"`expert_tensor_parallel\.etp_size` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False, train_batch_size=8)
    keep_block_from_accelerate()
    plugin.deepspeed_config["train_batch_size"] = "auto"
    plugin.deepspeed_config_process(must_match=False, train_batch_size=8)
    assert plugin.deepspeed_config["train_batch_size"] == 8
    assert plugin.deepspeed_config["expert_tensor_parallel"] == block
    with pytest.warns(FutureWarning, match="plan is now called"):
        assert parse_block(plugin.deepspeed_config) == ExpertTensorParallelConfig()
    # Other placeholders that nobody fills in are accelerate's to refuse, as ever.
    plugin.deepspeed_config["other"] = {"value": "auto"}
    with pytest.raises(ValueError, match=r"`other\.value` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False)
