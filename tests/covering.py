"""A covering design of parity cases: every pair of values that two axes can take together occurs in some case.

Faults of a combination nearly always need two of its values to meet; three is rare. The whole matrix is tens of
thousands of runs, its pairs fit into about a hundred. `make test` trains these; `python -m tests.record` writes down
their bits.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from tests.oracle import Recipe
from tests.sharded import Layout

WORLD = 4
LENGTHS = (12, 5, 9, 3)  # of uneven batches, by data-parallel rank

# Families whose attention AutoTP splits. How attention is split says nothing new of the other kinds of experts.
TP_FAMILIES = ("mixtral", "qwen3_moe", "glm4_moe")
# Transposed, with biases, interleaved; transposed; no gate; own calling convention; experts without weights; and one
# whose attention AutoTP refuses.
OTHER_FAMILIES = ("gpt_oss", "aria_text", "nemotron_h", "llama4_text", "longcat_flash", "olmoe")
UNDECORATED = ("llama4_text", "longcat_flash")
# The change that sends every token to every expert: in bf16, rounding would decide which one is second best.
EVERY_EXPERT: dict[str, dict[str, int]] = {
    "qwen3_moe": {"num_experts_per_tok": 8},
    "glm4_moe": {"num_experts_per_tok": 8, "topk_group": 4},
    "aria_text": {"moe_topk": 4},
    "longcat_flash": {"moe_topk": 6},
}

AXES: dict[str, tuple[Any, ...]] = {
    # (tp, etp, ep); edp is what is left of the four ranks.
    "split": (
        *((1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4)),
        *((2, 2, 1), (2, 1, 2), (2, 2, 2), (2, 4, 1), (2, 1, 4)),
        *((4, 2, 1), (4, 1, 2), (4, 2, 2), (4, 1, 4)),
    ),
    "family": (*TP_FAMILIES, *OTHER_FAMILIES),
    "dispatcher": ("auto", "replicated", "allgather", "alltoall", "alltoall_etp_first"),
    "stage": (0, 1, 2, 3),
    "optimizer": ("sgd", "adamw"),
    "dtype": ("fp32", "bf16"),
    "implementation": ("eager", "grouped_mm", "batched_mm"),
    "checkpointing": ("", "reentrant", "plain"),
    "uneven": (False, True),
}
Partial = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    """One value of each axis, and what is run for them."""

    split: tuple[int, int, int]
    family: str
    dispatcher: str
    stage: int
    optimizer: str
    dtype: str
    implementation: str
    checkpointing: str
    uneven: bool

    def __str__(self) -> str:
        words = [self.family, "x".join(map(str, self.split)), self.dispatcher, f"zero{self.stage}", self.optimizer]
        words += [self.dtype, self.implementation, self.checkpointing, "uneven" if self.uneven else ""]
        return "-".join(word for word in words if word)

    @property
    def layout(self) -> Layout:
        """How it is split. Older commits call the dispatcher a plan, and one of them otherwise."""
        tp, etp, ep = self.split
        sizes: dict[str, Any] = {"tp": tp, "etp": etp, "ep": ep, "stage": self.stage, "dtype": self.dtype}
        if "plan" in {field.name for field in fields(Layout)}:
            sizes["plan"] = self.dispatcher.replace("alltoall_etp_first", "alltoall_gather_first")
        else:
            sizes["dispatcher"] = self.dispatcher
        return Layout(world=WORLD, **sizes)

    @property
    def recipe(self) -> Recipe:
        """What is trained: two steps, since momentum shows in the second."""
        changes = EVERY_EXPERT.get(self.family, {"num_experts_per_tok": 4}) if self.dtype == "bf16" else {}
        return Recipe(
            family=self.family,
            optimizer=self.optimizer,
            dp=WORLD // self.split[0],
            steps=2,
            lengths=LENGTHS if self.uneven else (),
            implementation=self.implementation,
            changes=tuple(changes.items()),
            checkpointing=self.checkpointing,
        )


def fits(values: Partial) -> bool:
    """Whether values of some of the axes can meet."""
    tp, etp, ep = values.get("split", (None, 1, 1))
    family = values.get("family")
    if tp is not None:
        if values.get("dispatcher") == "replicated" and tp % (etp * ep):
            return False  # ranks of an expert group that hold other tokens
        if values.get("uneven") and tp == WORLD:
            return False  # one batch only
        if tp > 1 and family in OTHER_FAMILIES:
            return False
        if family == "longcat_flash" and 2 % ep:
            return False  # ep divides its two experts without weights too
    # Experts that aren't decorated have one forward.
    return family not in UNDECORATED or values.get("implementation", "eager") == "eager"


def can_be_completed(values: Partial) -> bool:
    """Whether some case has these values."""
    if not fits(values):
        return False
    rest = [axis for axis in AXES if axis not in values]
    return not rest or any(can_be_completed({**values, rest[0]: value}) for value in AXES[rest[0]])


def pairs_of(values: Partial) -> Iterator[Pair]:
    """Every two of the values, in the order of the axes."""
    return itertools.combinations([(axis, values[axis]) for axis in AXES if axis in values], 2)


@cache
def possible_pairs() -> tuple[Pair, ...]:
    """The pairs of values that some case can have."""
    items = [(axis, value) for axis, values in AXES.items() for value in values]
    pairs = itertools.combinations(items, 2)
    return tuple((a, b) for a, b in pairs if a[0] != b[0] and can_be_completed(dict((a, b))))


def _design(seed: int) -> list[Case]:
    """Covers the pairs greedily: from one that is left, each further axis takes the value that covers most."""
    chance = random.Random(seed)
    left = dict.fromkeys(sorted(possible_pairs(), key=lambda pair: chance.random()))
    used: Counter[tuple[str, Any]] = Counter()
    cases = []
    while left:
        values = dict(next(iter(left)))
        for axis in sorted(AXES, key=lambda axis: chance.random()):
            if axis in values:
                continue

            def gain(value: Any, axis: str = axis, values: Partial = values) -> tuple[int, int]:
                new = sum(pair in left for pair in pairs_of({**values, axis: value}))
                # Of equals the one that was used least, but for bf16, which needs a second run to compare with.
                return new, -used[axis, value] if axis != "dtype" else -AXES[axis].index(value)

            values[axis] = max((v for v in AXES[axis] if can_be_completed({**values, axis: v})), key=gain)
        used.update(values.items())
        for pair in pairs_of(values):
            left.pop(pair, None)
        cases.append(Case(**values))
    return cases


@cache
def covering() -> tuple[Case, ...]:
    """The table: the shortest of a few designs, the same everywhere."""
    return tuple(min((_design(seed) for seed in range(8)), key=len))
