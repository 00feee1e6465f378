"""The tiny families themselves: all are found, all build and train, nothing in them depends on chance."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from tests.families.discover import DECORATOR, Family, families, models_folder
from tests.families.special import DEAD, NOT_TINY
from tests.families.tiny import compute_loss, make_batch, make_tiny

BUILT = [family for family in families() if family.name not in NOT_TINY]
each = pytest.mark.parametrize("family", BUILT, ids=lambda family: family.name)
BATCHES = 4

# Classes that look like routed experts in the sources, and aren't.
NOT_ROUTED = {
    "InklingSharedExperts": "every token goes to all of them",
    "JetMoeMoA": "attention whose projections are experts: those are found",
    "VitPoseNaiveMoe": "picked by data set, the same for a whole image",
}


def look_for_experts() -> set[str]:
    """Names of classes that are decorated, hold one 3-d parameter for all experts, or are put to use as experts."""
    found: set[str] = set()
    for path in models_folder().glob("*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        found |= set(re.findall(rf"^@{DECORATOR}(?:\([^)]*\))?\s+class (\w+)", source, re.M))
        found |= set(re.findall(r"self\.experts = (?!nn\.|ModuleList)(\w+)\(", source))
        for body in re.split(r"^class ", source, flags=re.M)[1:]:
            shapes = re.findall(r"nn\.Parameter\(\s*torch\.\w+\(\(?([^()]*experts[^()]*)\)", body)
            if any(
                len([size for size in shape.split(",") if size.strip() and "=" not in size]) == 3 for shape in shapes
            ):
                found.add(re.match(r"\w+", body)[0])  # type: ignore[index]
    return found


def test_all_are_found() -> None:
    assert {family.experts for family in families()} == look_for_experts() - set(NOT_ROUTED)


def test_names_are_unique() -> None:
    names = [family.name for family in families()]
    assert len(names) == len(set(names))


def test_nothing_is_listed_in_vain() -> None:
    names = {family.name for family in families()}
    assert set(NOT_TINY) <= names
    assert set(DEAD) <= names


def experts_modules(family: Family, model: nn.Module) -> dict[str, nn.Module]:
    """The family's experts in a model, by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ == family.experts}


def dead_slices(name: str, tensor: Tensor) -> list[str]:
    """The parts of one expert parameter without a gradient: per expert where it holds one entry an expert."""
    if tensor.grad is None:
        return [name]
    if tensor.ndim != 3:
        return [] if tensor.grad.any() else [name]
    return [f"{name}[{expert}]" for expert, part in enumerate(tensor.grad) if not part.any()]


@each
def test_every_expert_trains(family: Family) -> None:
    model = make_tiny(family)
    experts = experts_modules(family, model)
    assert experts, f"no {family.experts} in {type(model).__name__}"
    for step in range(BATCHES):
        loss = compute_loss(model, make_batch(family, step, 0))
        assert torch.isfinite(loss)
        loss.backward()
    dead: list[str] = []
    for path, module in experts.items():
        for name, tensor in module.named_parameters():
            assert tensor.dtype == torch.float32
            assert all(size % 4 == 0 for size in tensor.shape), f"{path}.{name} {tuple(tensor.shape)}"
            assert tensor.grad is None or torch.isfinite(tensor.grad).all(), f"{path}.{name}"
            dead += dead_slices(f"{path}.{name}", tensor)
    expected, _ = DEAD.get(family.name, ("", ""))
    assert [name for name in dead if not (expected and re.search(expected, name))] == []
    assert bool(dead) == bool(expected), f"{family.name} needs no row in DEAD any more"


@each
def test_nothing_depends_on_chance(family: Family) -> None:
    """Same seed, same bits, whatever the global generator was at; training mode draws no random numbers."""
    first = make_tiny(family)
    torch.manual_seed(12345)
    second = make_tiny(family)
    ours, theirs = first.state_dict(), second.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert all(torch.isfinite(tensor).all() for tensor in ours.values() if tensor.is_floating_point())
    losses = [compute_loss(model, make_batch(family, 0, 0)) for model in (first, second, second)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[1], losses[2])


@each
def test_batches_differ(family: Family) -> None:
    batches = [make_batch(family, step, rank) for step in range(2) for rank in range(2)]
    assert all(tensor.shape[0] == 2 for batch in batches for tensor in batch.values())
    for name in batches[0]:
        assert len({tuple(batch[name].flatten().tolist()) for batch in batches}) == len(batches), name


@each
def test_it_builds_without_memory(family: Family) -> None:
    """On the meta device: shapes only."""
    with torch.device("meta"):
        model = make_tiny(family)
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in make_tiny(family).named_parameters()}
    assert all(tensor.is_meta for tensor in model.parameters())
