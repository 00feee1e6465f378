"""An ordinary Trainer script under ds_etp: the numbers of Trainer alone, on any layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.export.test_live import assert_same_bits, load
from tests.launcher import Launcher
from tests.models import make_model
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM, TENSOR
from tests.trainer.runs import Job, Outcome, forget_host_state, run_plain, run_sharded

LIMIT = 300


@cache
def plain(job: Job) -> Outcome:
    """Trainer alone on the same global batches, once for each job."""
    try:
        return run_plain(job, Path(mkdtemp(prefix="ds_etp-plain-")))
    finally:
        forget_host_state()


def assert_equal(got: Outcome, wanted: Outcome, *, evaluations: bool = True) -> None:
    """Everything Trainer logs, and the weights. fp32: the same sums in another order.

    With several data-parallel ranks, Trainer's evaluation loss (5.24, without us too) has the auxiliary loss
    once for each of them: it multiplies the loss by their number, and only in training is that averaged away.
    """
    assert got.rates == pytest.approx(wanted.rates, rel=1e-12)
    assert got.losses == pytest.approx(wanted.losses, rel=LOSS)
    assert got.norms == pytest.approx(wanted.norms, rel=NORM)
    if evaluations:
        assert got.evaluations == pytest.approx(wanted.evaluations, rel=LOSS)
    assert set(got.weights) == set(wanted.weights)
    for name, reference in wanted.weights.items():
        error = (got.weights[name] - reference).abs().max() / reference.abs().max()
        assert error.item() <= TENSOR, f"{name} is off by {error:.1e} of its largest entry"


CHECKPOINTING = (("gradient_checkpointing", True), ("gradient_checkpointing_kwargs", {"use_reentrant": False}))


@pytest.mark.sample("tp2-etp4-ep1-zero2", "tp2-etp2-ep2-zero3")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(world=2, etp=2, stage=0),
        Layout(world=2, etp=2, stage=1),
        Layout(world=2, etp=2, stage=3),
        Layout(world=4, tp=2, etp=2, ep=2, stage=1),
        Layout(world=4, tp=2, etp=4, stage=2),
        Layout(world=4, tp=2, etp=2, ep=2, stage=3),
    ],
    ids=lambda layout: f"tp{layout.tp}-etp{layout.etp}-ep{layout.ep}-zero{layout.stage}",
)
def test_equals_trainer_alone(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    job = Job()
    result = launcher.run(layout.world, run_sharded, timeout=LIMIT, job=job, layout=layout, folder=str(tmp_path))[0]
    assert result.facts["expert"][2] == 16 // layout.etp, "the experts are not split"
    assert_equal(result, plain(job), evaluations=layout.dp == 1)
    assert_same_bits(load(tmp_path / "model"), result.weights)


def test_evaluation_over_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    layout, job = Layout(world=4, tp=2, etp=2, ep=2), Job(aux=0.0)
    result = launcher.run(4, run_sharded, timeout=LIMIT, job=job, layout=layout, folder=str(tmp_path))[0]
    # Trainer averages over the tokens of all ranks' batches: in one process, those are one batch.
    assert_equal(result, plain(Job(aux=0.0, options=(("per_device_eval_batch_size", 2 * job.rows),))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [Layout(world=2, etp=2, stage=3), Layout(world=2, etp=1, ep=2, stage=3)], ids=str)
def test_zero3_from_pretrained(launcher: Launcher, tmp_path: Path, layout: Layout) -> None:
    job = Job()
    make_model(job.family).save_pretrained(tmp_path / "start")
    arguments = {"job": job, "layout": layout, "folder": str(tmp_path), "load_from": str(tmp_path / "start")}
    result = launcher.run(layout.world, run_sharded, timeout=LIMIT, **arguments)[0]
    # Right after from_pretrained: no rank holds more than its part of any expert.
    assert result.facts["held"] == result.facts["experts"] // layout.world
    assert_equal(result, plain(job), evaluations=False)


def test_gradient_checkpointing(launcher: Launcher, tmp_path: Path) -> None:
    layout, job = Layout(world=2, etp=2, stage=1), Job(options=CHECKPOINTING)
    result = launcher.run(2, run_sharded, timeout=LIMIT, job=job, layout=layout, folder=str(tmp_path))[0]
    assert_equal(result, plain(Job()), evaluations=False)


def test_uneven_last_batch(launcher: Launcher, tmp_path: Path) -> None:
    """19 sequences: the last step has fewer micro batches, its last one fewer sequences.

    One data-parallel rank, as accelerate fills up the last batch where there are more.
    """
    layout, job = Layout(world=2, tp=2, etp=2, stage=1), Job(train=19)
    result = launcher.run(2, run_sharded, timeout=LIMIT, job=job, layout=layout, folder=str(tmp_path))[0]
    assert_equal(result, plain(job))
