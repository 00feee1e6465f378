"""The arithmetic of chunks, without processes: any layout's chunks tile a tensor, and any other's come from them."""

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
    """Chunks that tile a shape: it is halved at random, again and again."""
    chunks = [Chunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(chunks) - 1))
        chunk = chunks[place]
        dims = [d for d, size in enumerate(chunk.size) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, chunk.size[dim] - 1))
        first, rest, start = list(chunk.size), list(chunk.size), list(chunk.start)
        first[dim], rest[dim], start[dim] = cut, chunk.size[dim] - cut, chunk.start[dim] + cut
        chunks[place : place + 1] = [Chunk(chunk.start, tuple(first)), Chunk(tuple(start), tuple(rest))]
    return chunks


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_tiling_fills_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    stored, wanted = data.draw(tilings(shape)), data.draw(tilings(shape))
    full = torch.arange(math.prod(shape)).reshape(shape)
    have = [full[chunk.slices()].clone() for chunk in stored]
    got = [torch.full(chunk.size, -1) for chunk in wanted]
    written = [torch.zeros(chunk.size, dtype=torch.int64) for chunk in wanted]
    for item in read_plan(stored, wanted):
        got[item.wanted_index][item.wanted_chunk.slices()] = have[item.stored_index][item.stored_chunk.slices()]
        written[item.wanted_index][item.wanted_chunk.slices()] += 1
    for chunk, tensor, count in zip(wanted, got, written, strict=True):
        assert torch.equal(tensor, full[chunk.slices()])
        assert (count == 1).all()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_tilings_are_told_from_others(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    chunks = data.draw(tilings(shape))
    assert coverage_error(shape, chunks) is None
    place = data.draw(st.integers(0, len(chunks) - 1))
    lacking = chunks[:place] + chunks[place + 1 :]
    assert coverage_error(shape, lacking) is not None
    assert "covers what another chunk covers" in (coverage_error(shape, [*chunks, chunks[place]]) or "")


def test_a_chunk_outside_is_named() -> None:
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
def test_shard_chunks_tile_uneven_fused_splits(dim: int, widths: list[list[int]]) -> None:
    """As AutoTP cuts a fused qkv: each rank has its share, perhaps none, of each block in turn."""
    shape = [2, 3, 2]
    shape[dim] = sum(map(sum, widths))
    full = torch.arange(math.prod(shape)).reshape(shape)
    chunks = [shard_chunks(tuple(shape), dim, widths, rank) for rank in range(len(widths[0]))]
    assert coverage_error(tuple(shape), [chunk.logical for rank in chunks for chunk in rank]) is None
    numbers = [chunk.number for rank in chunks for chunk in rank]
    assert len(set(numbers)) == len(numbers)
    offsets = [sum(map(sum, widths[:block])) for block in range(len(widths))]
    for rank, own in enumerate(chunks):
        blocks = [full.narrow(dim, offsets[b] + sum(w[:rank]), w[rank]) for b, w in enumerate(widths)]
        local = torch.cat(blocks, dim)
        for chunk in own:
            assert torch.equal(chunk.of(local), full[chunk.logical.slices()])


class _Experts(ShardedExperts, torch.nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, shard: Shard) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        self.ds_etp_shard = shard


@settings(max_examples=24, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_expert_chunks_are_the_shards(etp: int, ep: int, edp: int, more: int) -> None:
    """Against `layout.ParameterLayout.shard`, on every rank; each chunk has one writer, and it holds it."""
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
    chunks: dict[str, dict[int, tuple[int, LocalChunk]]] = {name: {} for name in full}
    for rank in range(topology.world):
        place = topology.index_in("ep", rank), topology.index_in("expt_tp", rank)
        shard = Shard("experts", layout, topology, *place, None)  # type: ignore[arg-type]
        own = {name: layout.parameters[name].shard(tensor, topology, *place) for name, tensor in full.items()}
        model = torch.nn.ModuleDict({"experts": _Experts(own["gate_up_proj"], own["down_proj"], shard)})
        for tensor in logical_tensors(model, topology, rank):
            name = tensor.name.removeprefix("experts.")
            assert tensor.kind == "expert" and tensor.shape == full[name].shape
            assert rank in tensor.replicas and tensor.replicas == topology.group_of("expert_dp", rank)
            assert sum(chunk.logical.numel for chunk in tensor.chunks) == own[name].numel()
            for chunk in tensor.chunks:
                assert torch.equal(chunk.of(own[name]), full[name][chunk.logical.slices()])
                if tensor.writer == rank:
                    assert chunk.number not in chunks[name], "written twice"
                    chunks[name][chunk.number] = rank, chunk
    for name, tensor in full.items():
        assert coverage_error(tuple(tensor.shape), [chunk.logical for _, chunk in chunks[name].values()]) is None
