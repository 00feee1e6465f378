"""What is compared: the models, who trains them, and how they are split. Data only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A small Mixtral in which the MoE layers dominate, and its batch.

    Attributes:
        experts, per_token: E and K.
        tokens: of one step, over all ranks together.
        length: of one sequence.
    """

    experts: int
    per_token: int
    hidden: int = 512
    intermediate: int = 256
    layers: int = 2
    heads: int = 8
    vocabulary: int = 512
    tokens: int = 2048
    length: int = 256

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return f"top-{self.per_token} of {self.experts}"


@dataclass(frozen=True)
class Case:
    """Who trains, and how the model is split.

    Attributes:
        name: as it is called in tables.
        kind: `ours`, `deepspeed` (plain ZeRO data parallelism), `transformers` or `autoep`.
        environment: `main`, or `autoep` for the older transformers that DeepSpeed's AutoEP works with.
        dispatcher: of ours.
        family: `mixtral`, or `glm4_moe`, which has a shared expert in every MoE block.
        overlap: whether that runs while tokens travel.
    """

    name: str
    kind: str
    world: int = 2
    tp: int = 1
    ep: int = 1
    etp: int = 1
    environment: str = "main"
    dispatcher: str = "auto"
    family: str = "mixtral"
    overlap: bool = False

    @property
    def dp(self) -> int:
        """How many different batches there are."""
        return self.world // self.tp


SHAPES = (Shape(8, 2), Shape(32, 8))
SMALLEST = Shape(4, 2, hidden=64, intermediate=32, heads=2, vocabulary=64, tokens=128, length=32)


def cases(world: int = 2) -> list[Case]:
    """Everybody, on `world` ranks."""
    n = world
    rows = [
        Case("DeepSpeed ZeRO-1, dp", "deepspeed", n),
        Case("transformers tp", "transformers", n, tp=n),
        Case("ds_etp tp = etp", "ours", n, tp=n, etp=n),
        Case("transformers ep", "transformers", n, ep=n),
        Case("ds_etp ep", "ours", n, ep=n),
        Case("transformers tp x ep", "transformers", n, tp=n, ep=n),
        Case("ds_etp tp x ep", "ours", n, tp=n, ep=n),
    ]
    old = [
        Case("AutoEP ep", "autoep", n, ep=n),
        Case("ds_etp ep", "ours", n, ep=n),
        Case("AutoEP + AutoTP tp x ep", "autoep", n, tp=n, ep=n),
        Case("ds_etp tp x ep", "ours", n, tp=n, ep=n),
    ]
    return rows + [Case(**{**asdict(row), "environment": "autoep"}) for row in old]


def plan_cases(world: int = 2) -> list[Case]:
    """Ours with every dispatcher that fits, in three layouts; `auto` among them."""
    layouts = {"tp x ep": (world, world, 1), "ep": (1, world, 1), "etp": (1, 1, world)}
    fitting = {
        "tp x ep": ("auto", "replicated", "allgather", "alltoall"),
        "ep": ("auto", "allgather", "alltoall"),
        "etp": ("auto", "allgather", "alltoall", "alltoall_etp_first"),
    }
    return [
        Case(f"{name}: {dispatcher}", "ours", world, tp=tp, ep=ep, etp=etp, dispatcher=dispatcher)
        for name, (tp, ep, etp) in layouts.items()
        for dispatcher in fitting[name]
    ]


def overlap_cases(world: int = 2) -> list[Case]:
    """A model with shared experts, without and with `overlap`, in three layouts."""
    layouts = {"tp = etp": (world, 1, world), "ep": (1, world, 1), "etp": (1, 1, world)}
    return [
        Case(f"{name}: {'with' if on else 'without'}", "ours", world, tp, ep, etp, family="glm4_moe", overlap=on)
        for name, (tp, ep, etp) in layouts.items()
        for on in (False, True)
    ]


def message_cases() -> list[Case]:
    """Those whose messages are compared, on as many ranks as that takes."""
    return [
        Case("transformers tp", "transformers", 2, tp=2),
        Case("ds_etp tp = etp", "ours", 2, tp=2, etp=2),
        Case("transformers tp x ep", "transformers", 4, tp=2, ep=4),
        Case("ds_etp tp x ep", "ours", 4, tp=2, ep=4),
        Case("AutoEP + AutoTP tp x ep", "autoep", 4, tp=2, ep=4, environment="autoep"),
        Case("ds_etp tp x ep", "ours", 4, tp=2, ep=4, environment="autoep"),
        Case("AutoEP ep", "autoep", 4, ep=4, environment="autoep"),
        Case("ds_etp ep", "ours", 4, ep=4, environment="autoep"),
    ]


@dataclass(frozen=True)
class Target:
    """A ratio of two cases that this project aims at: `case / peer <= most`, by shape.

    Attributes:
        of: what is compared, a field of `runs.Samples`; bytes for messages.
    """

    environment: str
    case: str
    peer: str
    most: dict[str, float]
    note: str = ""
    of: str = "forward_backward"


def message_targets() -> list[Target]:
    """Ratios of bytes."""
    top2, top8 = (shape.name for shape in SHAPES)
    bound = " (sending each token once to each rank: 13/14 at top-2 of 8, 0.47 at top-8 of 32, with uniform routing)"
    return [
        Target("main", "ds_etp tp = etp", "transformers tp", {top2: 1.0, top8: 1.0}),
        Target("main", "ds_etp tp x ep", "transformers tp x ep", {top2: 0.95, top8: 0.55}),
        Target("autoep", "ds_etp tp x ep", "AutoEP + AutoTP tp x ep", {}),
        Target("autoep", "ds_etp ep", "AutoEP ep", {top2: 0.92, top8: 0.52}, bound),
    ]


LIMIT_OF_A_MACHINE = "DeepSpeed ZeRO-1, dp"


def targets() -> list[Target]:
    """Ratios of times: to peers, and of CPU time to the same work without any message."""
    top2, top8 = (shape.name for shape in SHAPES)
    own = {
        "ds_etp tp x ep": {top2: 1.15, top8: 1.0},
        "ds_etp tp = etp": {top2: 1.15, top8: 1.45},
        "ds_etp ep": {top2: 1.0, top8: 0.97},
    }
    return [
        Target("autoep", "ds_etp tp x ep", "AutoEP + AutoTP tp x ep", {top2: 0.7, top8: 0.43}),
        Target("autoep", "ds_etp ep", "AutoEP ep", {top2: 0.92, top8: 0.85}),
        Target("main", "ds_etp tp = etp", "transformers tp", {top2: 1.0, top8: 1.0}),
        Target("main", "ds_etp tp = etp", "transformers tp", {top8: 1.0}, of="step"),
        *(Target("main", case, LIMIT_OF_A_MACHINE, most, of="processor") for case, most in own.items()),
        *(
            Target("main", f"transformers {layout}", LIMIT_OF_A_MACHINE, {}, of="processor")
            for layout in ("tp x ep", "tp", "ep")
        ),
    ]


# (tp, ep, etp) of the table of rows sent.
WIRE_LAYOUTS = (
    (2, 1, 2),
    (8, 1, 8),
    (8, 4, 2),
    (8, 2, 4),
    (4, 2, 2),
    (1, 2, 2),
    (1, 4, 2),
    (1, 8, 1),
    (8, 8, 1),
    (2, 2, 4),
    (1, 8, 2),
)


def as_json(row: Any) -> dict[str, Any]:
    """A row as it travels to the ranks."""
    return asdict(row)
