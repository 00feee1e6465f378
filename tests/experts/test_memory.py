"""No rank holds more than its share of the experts, not even on the way there."""

from __future__ import annotations

import gc

import pytest
import torch

from ds_etp.experts.sharded import Shard, expert_parameters
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

# Experts are most of this model, and one layer of them is larger than anything else in it.
CHANGES = (("num_hidden_layers", 4), ("intermediate_size", 256), ("num_local_experts", 8))
EXPERT_BYTES = 4 * 8 * 3 * 32 * 256 * 4  # layers x E x (gate, up, down) x H x I x fp32


def held_bytes(layout: Layout) -> dict[str, int]:
    """Expert bytes this rank holds as parameters once the engine is made."""
    engine = make_engine(Recipe(changes=CHANGES), layout)
    held = 0
    for _, parameter in expert_parameters(engine.module):
        tensor = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data
        # Stages above 0 keep parameters in flat buffers, where a parameter is a view of its bytes.
        held += tensor.untyped_storage().nbytes() if layout.stage == 0 else tensor.nbytes
    engine.destroy()
    return {"held": held}


@pytest.mark.sample(0, 2, 5, 6)
@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (Layout(world=4, etp=2, ep=2, stage=0), 4),
        (Layout(world=4, tp=4, etp=2, stage=0), 2),
        (Layout(world=4, tp=2, etp=4, stage=1), 4),
        (Layout(world=4, tp=2, etp=2, stage=2), 2),
        (Layout(world=4, etp=2, stage=3), 4),  # half by etp, half of that by ZeRO
        (Layout(world=4, etp=2, stage=3, zero_init=True), 4),
        (Layout(world=4, tp=2, etp=2, ep=2, stage=3, zero_init=True), 4),
    ],
    ids=str,
)
def test_expert_bytes_are_the_share_exactly(launcher: Launcher, layout: Layout, share: int) -> None:
    """total / (ep * etp), and with ZeRO-3 a part of that."""
    for result in launcher.run(4, held_bytes, layout=layout):
        assert result["held"] == EXPERT_BYTES // share


def conversion_peak(layout: Layout) -> dict[str, int]:
    """Most bytes of live fp32 tensors of expert size while a partitioned model is converted."""
    peaks: list[int] = []
    layer_elements = EXPERT_BYTES // 16  # elements of one whole layer's experts

    def live() -> int:
        # The largest other tensor of the model is the embedding, 96 x 32: far below an expert shard.
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() > 96 * 32
        }
        return sum(storages.values())

    before = live()  # what earlier cases of this process left behind
    original = Shard.slice

    def slice_and_measure(shard: Shard, name: str, full: torch.Tensor) -> torch.Tensor:
        part = original(shard, name, full)
        peaks.append(live())  # the full layer is gathered, and part of its shard is made
        return part

    Shard.slice = slice_and_measure  # type: ignore[method-assign]
    try:
        engine = make_engine(Recipe(changes=CHANGES), layout)
    finally:
        Shard.slice = original  # type: ignore[method-assign]
    engine.destroy()
    return {"peak": max(peaks) - before, "slices": len(peaks), "one_layer": layer_elements * 4}


def test_conversion_holds_one_full_layer_at_most(launcher: Launcher) -> None:
    """zero.Init, 2 ranks: everything else stays partitioned while one layer is whole."""
    layout = Layout(world=2, etp=2, stage=3, zero_init=True)
    for result in launcher.run(2, conversion_peak, layout=layout):
        assert result["slices"] == 2 * 4
        share = EXPERT_BYTES // 2
        assert result["peak"] <= share + result["one_layer"]
