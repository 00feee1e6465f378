"""Expert parameters: how they are sliced and put together again.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_etp.experts.layout import ParameterLayout
from ds_etp.parallel.topology import Topology


def gate_up(*shape: int) -> ParameterLayout:
    """`[E, 2I, H]`, gate and up one after the other."""
    return ParameterLayout(shape, dim=1, fused_chunks=2)


def down(*shape: int) -> ParameterLayout:
    """`[E, H, I]`."""
    return ParameterLayout(shape, dim=2)


def test_gate_and_up_are_sliced_half_each() -> None:
    full = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23]).view(1, 8, 1)  # gate 1x, up 2x; I is 4
    layout, topology = gate_up(*full.shape), Topology(2, etp=2)
    assert layout.shard(full, topology, 0, 0).flatten().tolist() == [10, 11, 20, 21]
    assert layout.shard(full, topology, 0, 1).flatten().tolist() == [12, 13, 22, 23]


def test_interleaved_gate_and_up_stay_together() -> None:
    full = torch.tensor([10, 20, 11, 21, 12, 22, 13, 23]).view(1, 1, 8)
    layout, topology = ParameterLayout((1, 1, 8), dim=2), Topology(2, etp=2)
    assert layout.shard(full, topology, 0, 0).flatten().tolist() == [10, 20, 11, 21]
    assert layout.shard(full, topology, 0, 1).flatten().tolist() == [12, 22, 13, 23]


def test_a_down_bias_is_held_whole() -> None:
    full = torch.arange(8).view(4, 2)
    layout, topology = ParameterLayout((4, 2), dim=None), Topology(4, etp=2, ep=2)
    for etp_index in range(2):
        assert layout.shard(full, topology, 1, etp_index).tolist() == [[4, 5], [6, 7]]
    shards = [[layout.shard(full, topology, i, j) for j in range(2)] for i in range(2)]
    shards[0][1] = shards[0][1] + 100  # what another than etp rank 0 holds doesn't count
    assert torch.equal(layout.unshard(shards), full)


def test_rows_of_experts_without_weights_are_dealt_out_apart() -> None:
    full = torch.arange(6).view(6, 1, 1)  # four experts and two that have none
    layout, topology = ParameterLayout((6, 1, 1), dim=1, experts=(4, 2)), Topology(2, ep=2)
    assert layout.shard(full, topology, 0, 0).flatten().tolist() == [0, 1, 4]
    assert layout.shard(full, topology, 1, 0).flatten().tolist() == [2, 3, 5]
    assert torch.equal(layout.unshard([[layout.shard(full, topology, i, 0)] for i in range(2)]), full)


def test_down_is_sliced_by_columns() -> None:
    full = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]]).view(1, 2, 4)  # H is 2
    layout, topology = down(*full.shape), Topology(2, etp=2)
    assert layout.shard(full, topology, 0, 0).tolist() == [[[10, 11], [20, 21]]]
    assert layout.shard(full, topology, 0, 1).tolist() == [[[12, 13], [22, 23]]]


def test_ep_takes_neighbouring_experts() -> None:
    full = torch.arange(4).view(4, 1, 1).expand(4, 2, 1)
    topology = Topology(2, ep=2)
    layout = gate_up(*full.shape)
    assert layout.shard(full, topology, 0, 0)[:, 0, 0].tolist() == [0, 1]
    assert layout.shard(full, topology, 1, 0)[:, 0, 0].tolist() == [2, 3]


sizes = st.integers(1, 4)


@settings(max_examples=200, deadline=None)
@given(ep=sizes, etp=sizes, experts=sizes, hidden=sizes, columns=sizes, gated=st.booleans())
def test_round_trip(ep: int, etp: int, experts: int, hidden: int, columns: int, gated: bool) -> None:
    topology = Topology(ep * etp, ep=ep, etp=etp)
    intermediate = columns * etp
    shape = (experts * ep, 2 * intermediate, hidden) if gated else (experts * ep, hidden, intermediate)
    layout = gate_up(*shape) if gated else down(*shape)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [[layout.shard(full, topology, i, j) for j in range(etp)] for i in range(ep)]
    own = (experts, 2 * columns, hidden) if gated else (experts, hidden, columns)
    assert layout.local_shape(topology) == own
    assert all(shard.shape == own for row in shards for shard in row)
    # Every element is in exactly one shard, and goes back to its place.
    assert torch.equal(torch.cat([shard.flatten() for row in shards for shard in row]).sort().values, full.flatten())
    assert torch.equal(layout.unshard(shards), full)


@pytest.mark.parametrize("shape", [(0, 4, 2), (4, 4, 0)], ids=["no experts", "no hidden"])
def test_empty_parameters_go_round_too(shape: tuple[int, ...]) -> None:
    topology, full = Topology(4, ep=2, etp=2), torch.zeros(shape)
    layout = gate_up(*shape)
    shards = [[layout.shard(full, topology, i, j) for j in range(2)] for i in range(2)]
    assert layout.unshard(shards).shape == shape
