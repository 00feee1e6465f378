"""What a command left behind: losses and norms, step by step, and the weights it saved; and how far two runs differ."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.tolerances import NOISE
from tests.trainers.cases import ROOT, STEPS, Case, Layout

# fp32 on the CPU: the same sums in another order, 6e-8 a rounding, and a loss is a sum of some hundred terms. ms-swift
# logs eight decimals.
LOSS = 1e-6
# DPO's loss comes from differences of log-probabilities of whole answers: about 400 here, where a rounding is 3e-5;
# with beta 0.1 and four of them.
PREFERENCE_LOSS = 1e-5
# Four AdamW steps with eps 1e-3: see tests/oracle.py. Measured against the tensor's largest entry.
WEIGHT = 1e-5
# An adapter's B starts at zero: it is the steps alone, in which the rounding of small gradients counts in full.
ADAPTER_WEIGHT = 1e-4
UNREAD = "block that nobody reads: experts are NOT split"


class Differs(AssertionError):
    """A run's numbers are not its reference's."""


@dataclass(frozen=True)
class Difference:
    """The largest relative differences; None: not compared."""

    losses: float | None = None
    weights: float | None = None


def losses(case: Case) -> list[float]:
    """The loss of every step, as Trainer's state has it.

    Raises:
        Differs: there is none: the case was not run.
    """
    folder = ROOT / case.output
    states = [folder / "trainer_state.json", *folder.glob(f"checkpoint-{STEPS}/trainer_state.json")]
    found = next((path for path in states if path.exists()), None)
    if found is None:
        raise Differs(f"{case.id}: no losses in {case.output}: run it first, `--case '{case.id}'`")
    state = json.loads(found.read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def weights(case: Case) -> dict[str, Tensor]:
    """All tensors of the saved model or adapter."""
    found: dict[str, Tensor] = {}
    for path in sorted((ROOT / case.output / case.final).glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise Differs(f"{case.id}: no weights in {case.output / case.final}")
    return found


def compare(case: Case, reference: Case) -> Difference:
    """Compares what a case asks for.

    Raises:
        Differs: by more than rounding.
    """
    by_loss = by_weight = None
    if case.compare in ("both", "losses"):
        got, wanted = losses(case), losses(reference)
        if not len(got) == len(wanted) == STEPS:
            raise Differs(f"{case.id}: {len(got)} losses, {len(wanted)} of the reference, for {STEPS} steps")
        pairs = list(zip(got, wanted, strict=True))[case.first_step - 1 :]
        by_loss = max(abs(a - b) / abs(b) for a, b in pairs)
        if not by_loss <= (PREFERENCE_LOSS if case.method == "dpo" else LOSS):
            raise Differs(f"{case.id}: losses {got}, reference {wanted}: {by_loss:.1e} apart")
    if case.compare in ("both", "weights"):
        by_weight = _compare_weights(case, reference)
    return Difference(by_loss, by_weight)


def _compare_weights(case: Case, reference: Case) -> float:
    got, wanted = weights(case), weights(reference)
    if set(got) != set(wanted):
        raise Differs(f"{case.id}: other tensors: {sorted(set(got) ^ set(wanted))[:6]}")
    worst = 0.0
    noise = NOISE * max(tensor.float().abs().max().item() for tensor in wanted.values())
    for name, tensor in wanted.items():
        if got[name].shape != tensor.shape:
            raise Differs(f"{case.id}: {name} is {tuple(got[name].shape)} instead of {tuple(tensor.shape)}")
        largest = max(tensor.float().abs().max().item(), noise)
        error = (got[name].float() - tensor.float()).abs().max().item() / largest
        if not error <= (ADAPTER_WEIGHT if "lora_" in name else WEIGHT):
            raise Differs(f"{case.id}: {name} is off by {error:.1e} of its largest entry")
        worst = max(worst, error)
    return worst


def moved(case: Case, start: Path) -> float:
    """How far training has moved an experts tensor, relative to its largest entry: a run that trains nothing agrees."""
    before = {}
    for path in sorted((ROOT / start).glob("*.safetensors")):
        before |= load_file(path)
    after = weights(case)
    name = next(name for name in before if ".experts." in name)
    return ((after[name].float() - before[name]).abs().max() / before[name].abs().max()).item()


def check_log(case: Case, text: str) -> None:
    """The layout is that of the case, and the warning is there where nobody reads the block, and only there.

    Raises:
        Differs: it is another.
    """
    table = text.partition("[ds_etp] expert tensor parallelism")[2].partition("└")[0]
    said = dict(re.findall(r"│ (tp|etp|ep|experts modules) +│ (\d+) ", table))
    wanted = _sizes(case.layout)
    if wanted is None and said:
        raise Differs(f"{case.id}: experts were split, {said}")
    if wanted is not None and any(said.get(name) != size for name, size in wanted.items()):
        raise Differs(f"{case.id}: the log says {said or 'nothing of a split'}, not {wanted}")
    if (UNREAD in text) != case.warns:
        raise Differs(f"{case.id}: {'no' if case.warns else 'a'} warning that nobody reads the block")


def _sizes(layout: Layout | None) -> dict[str, str] | None:
    if layout is None:
        return None
    return {"tp": str(layout.tp), "etp": str(layout.etp), "ep": str(layout.ep), "experts modules": "2"}
