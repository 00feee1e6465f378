"""TRL's GRPO and RLOO without vLLM: split models generate, are rewarded and learn what plain DeepSpeed's do.

At ZeRO-3 TRL generates inside `GatheredParameters` over all parameters, without DeepSpeed's hooks: whole parameters
then lie in modules that compute with shards. (With `ds3_gather_for_generation=False` TRL 1.16 fails in the backward
pass of plain DeepSpeed 0.19.8 too.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.launcher import CaseFailed, Launcher
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM, TENSOR

pytest.importorskip("trl", reason="trl is not among the requirements: pip install trl, then this runs")

from tests.trainer.rollout_runs import EOS, STEPS, Drawn, Rollouts, rollouts

LIMIT = 240
# Advantages are rewards less their average, and log-probabilities are summed over tokens, in fp32; the weights are
# after three Adam steps.
FACTOR = 10

KL = (("beta", 0.1), ("sync_ref_model", True), ("ref_model_sync_steps", 1))
AGAIN = (("num_iterations", 2),)
CASES = [
    (Rollouts(), Layout(2, etp=2, stage=3)),
    (Rollouts("mixtral"), Layout(2, ep=2, stage=3)),
    (Rollouts(), Layout(2, tp=2, etp=2, stage=3)),
    (Rollouts(options=AGAIN), Layout(4, tp=2, etp=2, stage=3)),
    (Rollouts("mixtral", options=AGAIN), Layout(4, tp=2, ep=2, stage=3)),
    (Rollouts(options=KL), Layout(2, etp=2, stage=3)),
    (Rollouts(options=KL), Layout(4, tp=2, etp=2, ep=2, stage=3)),
    (Rollouts(lora=True, options=KL[:1]), Layout(2, ep=2, stage=3)),
    (Rollouts(lora=True), Layout(4, tp=2, etp=2, stage=3)),
    (Rollouts(by_launcher=True), Layout(2, tp=2, etp=2, stage=3)),
    (Rollouts(by_launcher=True), Layout(4, tp=2, ep=2, stage=3)),
    (Rollouts(trainer="RLOO"), Layout(2, etp=2, stage=3)),
    (Rollouts(options=KL), Layout(4, tp=2, etp=2, stage=2)),
]


def named(value: Any) -> str:
    """A case's name."""
    if isinstance(value, Layout):
        return f"w{value.world}-tp{value.tp}-etp{value.etp}-ep{value.ep}-zero{value.stage}"
    ways = "-lora" * value.lora + "-launched" * value.by_launcher
    return "-".join([f"{value.trainer}-{value.family}{ways}", *(f"{key}={entry}" for key, entry in value.options)])


@cache
def plain(launcher: Launcher, case: Rollouts, ranks: int) -> list[Drawn]:
    """DeepSpeed and TRL alone."""
    layout = Layout(ranks, stage=3, with_block=False)
    return launcher.run(ranks, rollouts, timeout=LIMIT, case=case, layout=layout, folder=mkdtemp(prefix="ds_etp-"))


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize(("case", "layout"), CASES, ids=named)
def test_equals_plain_deepspeed(launcher: Launcher, tmp_path: Any, case: Rollouts, layout: Layout) -> None:
    """Every rank's completions, the rewards, losses, norms and all weights."""
    wanted = plain(launcher, replace(case, by_launcher=False), layout.dp)
    got = launcher.run(layout.world, rollouts, timeout=LIMIT, case=case, layout=layout, folder=str(tmp_path))
    lengths = {len(ids) for drawn in wanted for ids in drawn.completions}
    assert len(lengths) > 1 and any(ids[-1] == EOS for drawn in wanted for ids in drawn.completions)
    for rank, drawn in enumerate(got):
        assert drawn.completions == wanted[rank // layout.tp].completions, f"rank {rank}"
        assert drawn.rewards == pytest.approx(wanted[0].rewards, rel=LOSS) and drawn.rewards
    run, oracle = got[0].outcome, wanted[0].outcome
    assert run is not None and oracle is not None
    assert len(run.losses) == STEPS and all(norm > 0 for norm in run.norms)
    for values, reference, limit in ((run.losses, oracle.losses, LOSS), (run.norms, oracle.norms, NORM)):
        assert values == pytest.approx(reference, rel=FACTOR * limit, abs=FACTOR * limit)
    assert set(run.weights) == set(oracle.weights)
    for name, reference in oracle.weights.items():
        error = (run.weights[name] - reference).abs().max() / reference.abs().max().clamp(min=1e-12)
        assert error <= TENSOR, f"{name} is off by {error:.1e} of its largest entry"


def test_continuous_batching_is_refused(launcher: Launcher, tmp_path: Any) -> None:
    """Each rank's scheduler would run forward passes of its own number, and their collectives would never meet."""
    case = Rollouts(options=(("use_transformers_continuous_batching", True),))
    with pytest.raises(CaseFailed, match=r"generate_batch.*is not supported.*generate\(\)"):
        launcher.run(2, rollouts, timeout=60, case=case, layout=Layout(2, etp=2, stage=1), folder=str(tmp_path))
