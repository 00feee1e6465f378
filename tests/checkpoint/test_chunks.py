"""The arithmetic of boxes, without processes: any layout's boxes tile a tensor, and any other's come from them."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_etp.checkpoint.chunks import Chunk, LocalChunk, coverage_error, logical_tensors, read_plan, shard_chunks
from ds_etp.experts.layout import ExpertsLayout, ParameterLayout
from ds_etp.experts.sharded import Shard, ShardedExperts
from ds_etp.parallel.topology import Topology

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Chunk]:
    """Boxes that tile a shape: it is halved at random, again and again."""
    boxes = [Chunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(boxes) - 1))
        box = boxes[place]
        dims = [d for d, size in enumerate(box.size) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.size[dim] - 1))
        first, rest, start = list(box.size), list(box.size), list(box.start)
        first[dim], rest[dim], start[dim] = cut, box.size[dim] - cut, box.start[dim] + cut
        boxes[place : place + 1] = [Chunk(box.start, tuple(first)), Chunk(tuple(start), tuple(rest))]
    return boxes


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_tiling_fills_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    stored, wanted = data.draw(tilings(shape)), data.draw(tilings(shape))
    full = torch.arange(math.prod(shape)).reshape(shape)
    have = [full[box.slices()].clone() for box in stored]
    got = [torch.full(box.size, -1) for box in wanted]
    written = [torch.zeros(box.size, dtype=torch.int64) for box in wanted]
    for copy in read_plan(stored, wanted):
        got[copy.target][copy.write.slices()] = have[copy.source][copy.read.slices()]
        written[copy.target][copy.write.slices()] += 1
    for box, tensor, count in zip(wanted, got, written, strict=True):
        assert torch.equal(tensor, full[box.slices()])
        assert (count == 1).all()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_tilings_are_told_from_others(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(tilings(shape))
    assert coverage_error(shape, boxes) is None
    place = data.draw(st.integers(0, len(boxes) - 1))
    lacking = boxes[:place] + boxes[place + 1 :]
    assert coverage_error(shape, lacking) is not None
    assert "covers what another box covers" in (coverage_error(shape, [*boxes, boxes[place]]) or "")


def test_a_box_outside_is_named() -> None:
    assert "not inside (4,)" in (coverage_error((4,), [Chunk((2,), (3,))]) or "")
    assert "not inside (4,)" in (coverage_error((4,), [Chunk((0, 0), (4, 1))]) or "")
    assert "cover 3 of 4 entries" in (coverage_error((4,), [Chunk((0,), (3,))]) or "")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2),
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any), min_size=1, max_size=3)
    ),
)
def test_strips_tile_uneven_fused_splits(dim: int, widths: list[list[int]]) -> None:
    """As AutoTP cuts a fused qkv: each rank has its share, perhaps none, of each block in turn."""
    shape = [2, 3, 2]
    shape[dim] = sum(map(sum, widths))
    full = torch.arange(math.prod(shape)).reshape(shape)
    pieces = [shard_chunks(tuple(shape), dim, widths, rank) for rank in range(len(widths[0]))]
    assert coverage_error(tuple(shape), [piece.box for rank in pieces for piece in rank]) is None
    numbers = [piece.number for rank in pieces for piece in rank]
    assert len(set(numbers)) == len(numbers)
    offsets = [sum(map(sum, widths[:block])) for block in range(len(widths))]
    for rank, own in enumerate(pieces):
        blocks = [full.narrow(dim, offsets[b] + sum(w[:rank]), w[rank]) for b, w in enumerate(widths)]
        local = torch.cat(blocks, dim)
        for piece in own:
            assert torch.equal(piece.of(local), full[piece.box.slices()])


class _Experts(ShardedExperts, torch.nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, shard: Shard) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        self.ds_etp_shard = shard


@settings(max_examples=24, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_expert_boxes_are_the_shards(etp: int, ep: int, edp: int, more: int) -> None:
    """Against `layouts.ParameterLayout.shard`, on every rank; each box has one writer, and it holds it."""
    topology = Topology(etp * ep * edp, etp=etp, ep=ep)
    experts, hidden, inner = 4, 3, 4 * more
    parameters = {
        "gate_up_proj": ParameterLayout((experts, 2 * inner, hidden), 1, 2),
        "down_proj": ParameterLayout((experts, hidden, inner), 2),
    }
    layout = ExpertsLayout(experts, hidden, inner, parameters)
    full = {
        "gate_up_proj": torch.randn(experts, 2 * inner, hidden),
        "down_proj": torch.randn(experts, hidden, inner),
    }
    boxes: dict[str, dict[int, tuple[int, LocalChunk]]] = {name: {} for name in full}
    for rank in range(topology.world):
        place = topology.index_in("ep", rank), topology.index_in("expt_tp", rank)
        shard = Shard("experts", layout, topology, *place, None)  # type: ignore[arg-type]
        own = {name: layout.parameters[name].shard(tensor, topology, *place) for name, tensor in full.items()}
        model = torch.nn.ModuleDict({"experts": _Experts(own["gate_up_proj"], own["down_proj"], shard)})
        for tensor in logical_tensors(model, topology, rank):
            name = tensor.name.removeprefix("experts.")
            assert tensor.kind == "expert" and tensor.shape == full[name].shape
            assert rank in tensor.replicas and tensor.replicas == topology.group_of("expert_dp", rank)
            assert sum(piece.box.numel for piece in tensor.pieces) == own[name].numel()
            for piece in tensor.pieces:
                assert torch.equal(piece.of(own[name]), full[name][piece.box.slices()])
                if tensor.writer == rank:
                    assert piece.number not in boxes[name], "written twice"
                    boxes[name][piece.number] = rank, piece
    for name, tensor in full.items():
        assert coverage_error(tuple(tensor.shape), [piece.box for _, piece in boxes[name].values()]) is None
