"""TRL's trainers train what one process does, with attention and experts both split."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.export.test_live import LIMIT, load
from tests.launcher import CaseFailed, Launcher
from tests.sharded import Layout, with_options
from tests.tolerances import LOSS, NORM, TENSOR

pytest.importorskip("trl", reason="trl is not among the requirements: pip install trl, then this runs")

from tests.trainer.runs import AUTO
from tests.trainer.trl_runs import Case, run_plain, run_sharded

# Trainer logs losses and norms of sums over another order of micro batches; the weights are after three Adam steps.
FACTOR = 10


@pytest.mark.sample(1, 2, 4)
@pytest.mark.parametrize(
    ("case", "stage"),
    [
        (Case("sft"), 1),
        (Case("sft", lora=True), 2),
        (Case("dpo"), 3),
        (Case("dpo", lora=True), 1),
        (Case("grpo"), 1),
    ],
    ids=str,
)
def test_equals_one_process(launcher: Launcher, tmp_path: Path, case: Case, stage: int) -> None:
    """Losses, norms, and all weights, those that don't train included."""
    wanted = run_plain(case, tmp_path / "plain")
    # As the docs write the block: TRL's trainers, and the engines they make themselves, get a config with "auto" in it.
    layout = with_options(Layout(world=4, tp=2, etp=2, stage=stage), **AUTO)
    got = launcher.run(4, run_sharded, timeout=LIMIT, case=case, layout=layout, folder=str(tmp_path))[0]
    assert len(got.losses) == len(wanted.losses) == 3 and any(wanted.norms)
    for values, reference, limit in ((got.losses, wanted.losses, LOSS), (got.norms, wanted.norms, NORM)):
        assert values == pytest.approx(reference, rel=FACTOR * limit, abs=FACTOR * limit)
    assert set(got.weights) == set(wanted.weights)
    for name, reference in wanted.weights.items():
        error = (got.weights[name] - reference).abs().max() / reference.abs().max().clamp(min=1e-12)
        assert error <= TENSOR, f"{name} is off by {error:.1e} of its largest entry"


@pytest.mark.full
def test_grpo_that_samples(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks of a tensor-parallel group have the same completions, or their losses would differ and the run stop."""
    layout = Layout(world=4, tp=2, etp=2, stage=3)
    case = Case("grpo", sampled=True)
    got = launcher.run(4, run_sharded, timeout=LIMIT, case=case, layout=layout, folder=str(tmp_path))[0]
    assert len(got.losses) == 3 and all(math.isfinite(norm) and norm > 0 for norm in got.norms)
    load(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert all(torch.isfinite(tensor).all() for tensor in got.weights.values())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("grpo", options=(("scale_rewards", "batch"),)), r"scale_rewards='batch'.*autotp_size=2"),
        (Case("dpo", options=(("precompute_ref_log_probs", True),)), r"precompute_ref_log_probs=True is wrong under"),
        (Case("grpo", options=(("num_generations", 16),)), r"num_generations=16 doesn't divide.*= 8"),
    ],
    ids=["deviation of all ranks", "gathered by place", "group over ranks"],
)
def test_refused(launcher: Launcher, tmp_path: Path, case: Case, message: str) -> None:
    """What the same rewards several times over would change."""
    layout = Layout(world=2, tp=2, etp=2)
    with pytest.raises(CaseFailed, match=message):
        launcher.run(2, run_sharded, timeout=LIMIT, case=case, layout=layout, folder=str(tmp_path))
