"""Every collective on real ranks: forward, backward, and the dot-product identity <A x, y> = <x, A' y>.

Legend: T tokens, t own tokens. Values are small whole numbers, so every sum is exact in whatever order it is
taken, and results are compared with `==`: no tolerance anywhere but in the bf16 test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.dispatch.permute import permute, unpermute
from ds_etp.dispatch.segments import Segments
from ds_etp.parallel import autograd as c
from ds_etp.parallel import collectives as rows
from ds_etp.parallel.collectives import balanced_splits
from ds_etp.parallel.process_groups import ProcessGroupInfo
from tests.launcher import Launcher

WIDTH = 3
# Ops that sum, in one direction.
REDUCING = (
    "all_gather",
    "reduce_scatter",
    "slice_replicated",
    "reduce_scatter_all_gather",
    "copy_to_group",
    "reduce_from_group",
    "permute",
    "unpermute",
)


@dataclass(frozen=True)
class Axis:
    """The peers of one test, known to all of them: how many, which one this is, and how blocks divide them."""

    peers: ProcessGroupInfo
    block: ProcessGroupInfo

    @property
    def size(self) -> int:
        return self.peers.size

    def block_of(self, place: int) -> range:
        """The places that are in one block with `place`."""
        first = place // self.block.size * self.block.size
        return range(first, first + self.block.size)


@dataclass(frozen=True)
class Op:
    """One collective, and the same computation in one process.

    Attributes:
        one_in, one_out: whether all peers hold one and the same input or output, which then counts once in
            an inner product; else each peer's is a part of its own.
        several: whether it takes several tensors.
        shapes: from the number of peers to the cases, each a tuple of sizes.
        rows_in: rows of a peer's input, from the case, the axis and the peer's place.
        call: runs the collective on this rank.
        plain: every peer's output from every peer's input.
    """

    one_in: bool
    one_out: bool
    several: bool
    shapes: Callable[[int], list[Any]]
    rows_in: Callable[[Any, Axis, int], int]
    call: Callable[..., tuple[Tensor, ...]]
    plain: Callable[[Axis, Any, Sequence[Tensor]], list[Tensor]]


def totals(size: int) -> list[int]:
    """Even, uneven, fewer rows than peers, none."""
    return [2 * size, 2 * size + 1, 1, 0]


def parts(size: int) -> list[tuple[int, ...]]:
    """Rows by peer: even, uneven, some without any, all but one without any, none."""
    return [(2,) * size, (1, 4, 2, 3)[:size], (3, 0, 0, 2)[:size], (0, 2, 0, 0)[:size], (0,) * size]


def routes(size: int) -> list[list[list[int]]]:
    """Rows by sender and receiver: even, uneven, some empty, one rank sends all to one, none."""
    every = range(size)
    return [
        [[2 for _ in every] for _ in every],
        [[1 + (3 * i + 5 * j) % 4 for j in every] for i in every],
        [[(i + 2 * j) % 3 * (i != j) for j in every] for i in every],
        [[5 * (i == size - 1 and j == 0) for j in every] for i in every],
        [[0 for _ in every] for _ in every],
    ]


def _cut(axis: Axis, whole: Tensor) -> list[Tensor]:
    return list(whole.split(balanced_splits(len(whole), axis.size)))


def _shared(axis: Axis, whole: Tensor) -> list[Tensor]:
    pieces = _cut(axis, whole)
    return [torch.cat([pieces[i] for i in axis.block_of(place)]) for place in range(axis.size)]


def _routed(axis: Axis, table: list[list[int]], xs: Sequence[Tensor]) -> list[Tensor]:
    runs = [x.split(row) for x, row in zip(xs, table, strict=True)]
    return [torch.cat([run[receiver] for run in runs]) for receiver in range(axis.size)]


def _all_to_all(axis: Axis, table: list[list[int]], *tensors: Tensor, **_: Any) -> tuple[Tensor, ...]:
    place = axis.peers.index
    return c.all_to_all(axis.peers, table[place], [row[place] for row in table], *tensors)


def _unshared(axis: Axis, total: int, xs: Sequence[Tensor]) -> list[Tensor]:
    firsts = range(0, axis.size, axis.block.size)
    whole = torch.cat([torch.stack([xs[i] for i in axis.block_of(first)]).sum(0) for first in firsts])
    return [whole] * axis.size


def _rows_of(axis: Axis, total: int, place: int) -> Tensor:
    """The rows that a peer picks: each row is picked by all peers but one, where there are several."""
    picked = [row for row in range(total) if axis.size == 1 or (row + place) % axis.size]
    return torch.tensor(picked, dtype=torch.int64)


def _pick(axis: Axis, total: int, tensor: Tensor, **options: Any) -> tuple[Tensor, ...]:
    row = _rows_of(axis, total, axis.peers.index)
    x, weights = permute(
        axis.peers, Segments.of(row, total), row, torch.zeros_like(row), tensor[:, 1:], tensor[:, :1], **options
    )
    return (torch.cat([weights, x], 1),)


def _put(axis: Axis, total: int, tensor: Tensor, **options: Any) -> tuple[Tensor, ...]:
    row = _rows_of(axis, total, axis.peers.index)
    return (unpermute(axis.peers, Segments.of(row, total), row, tensor, **options).to(tensor.dtype),)


def _put_plainly(axis: Axis, total: int, xs: Sequence[Tensor]) -> list[Tensor]:
    whole = sum(x.new_zeros(total, x.shape[1]).index_add(0, _rows_of(axis, total, i), x) for i, x in enumerate(xs))
    return [whole] * axis.size


OPS: dict[str, Op] = {
    "scatter_to_tp": Op(
        one_in=True,
        one_out=False,
        several=True,
        shapes=totals,
        rows_in=lambda total, axis, place: total,
        call=lambda axis, total, *tensors, **_: c.scatter_to_tp(axis.peers, *tensors),
        plain=lambda axis, total, xs: _cut(axis, xs[0]),
    ),
    "gather_from_tp": Op(
        one_in=False,
        one_out=True,
        several=False,
        shapes=totals,
        rows_in=lambda total, axis, place: balanced_splits(total, axis.size)[place],
        call=lambda axis, total, tensor, **_: (c.gather_from_tp(axis.peers, total, tensor),),
        plain=lambda axis, total, xs: [torch.cat(list(xs))] * axis.size,
    ),
    "all_gather": Op(
        one_in=False,
        one_out=False,
        several=True,
        shapes=parts,
        rows_in=lambda sizes, axis, place: sizes[place],
        call=lambda axis, sizes, *tensors, **options: c.all_gather(axis.peers, sizes, *tensors, **options),
        plain=lambda axis, sizes, xs: [torch.cat(list(xs))] * axis.size,
    ),
    "reduce_scatter": Op(
        one_in=False,
        one_out=False,
        several=False,
        shapes=parts,
        rows_in=lambda sizes, axis, place: sum(sizes),
        call=lambda axis, sizes, tensor, **options: (c.reduce_scatter(axis.peers, sizes, tensor, **options),),
        plain=lambda axis, sizes, xs: list(torch.stack(list(xs)).sum(0).split(list(sizes))),
    ),
    "slice_replicated": Op(
        one_in=True,
        one_out=False,
        several=True,
        shapes=totals,
        rows_in=lambda total, axis, place: total,
        call=lambda axis, total, *tensors, **options: c.slice_replicated(axis.peers, axis.block, *tensors, **options),
        plain=lambda axis, total, xs: _shared(axis, xs[0]),
    ),
    "reduce_scatter_all_gather": Op(
        one_in=False,
        one_out=True,
        several=False,
        shapes=totals,
        rows_in=lambda total, axis, place: sum(balanced_splits(total, axis.size)[i] for i in axis.block_of(place)),
        call=lambda axis, total, tensor, **options: (
            c.reduce_scatter_all_gather(axis.peers, axis.block, total, tensor, **options),
        ),
        plain=_unshared,
    ),
    "copy_to_group": Op(
        one_in=True,
        one_out=False,
        several=True,
        shapes=totals,
        rows_in=lambda total, axis, place: total,
        call=lambda axis, total, *tensors, **options: c.copy_to_group(axis.peers, *tensors, **options),
        plain=lambda axis, total, xs: [xs[0]] * axis.size,
    ),
    "reduce_from_group": Op(
        one_in=False,
        one_out=True,
        several=False,
        shapes=totals,
        rows_in=lambda total, axis, place: total,
        call=lambda axis, total, tensor, **options: (c.reduce_from_group(axis.peers, tensor, **options),),
        plain=lambda axis, total, xs: [torch.stack(list(xs)).sum(0)] * axis.size,
    ),
    "permute": Op(
        one_in=True,
        one_out=False,
        several=False,
        shapes=totals,
        rows_in=lambda total, axis, place: total,
        call=_pick,
        plain=lambda axis, total, xs: [xs[0][_rows_of(axis, total, place)] for place in range(axis.size)],
    ),
    "unpermute": Op(
        one_in=False,
        one_out=True,
        several=False,
        shapes=totals,
        rows_in=lambda total, axis, place: len(_rows_of(axis, total, place)),
        call=_put,
        plain=_put_plainly,
    ),
    "all_to_all": Op(
        one_in=False,
        one_out=False,
        several=True,
        shapes=routes,
        rows_in=lambda table, axis, place: sum(table[place]),
        call=_all_to_all,
        plain=_routed,
    ),
}


# In the workers


def make_axis(groups: Sequence[Sequence[int]], block: int = 1) -> Axis:
    """This rank's peers, and blocks of `block` neighbours among them. Collective over the world."""
    rank = dist.get_rank()

    def join(kind: Sequence[Sequence[int]]) -> ProcessGroupInfo:
        own = None
        for ranks in kind:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                own = ProcessGroupInfo(tuple(ranks), list(ranks).index(rank), group if len(ranks) > 1 else None)
        assert own is not None
        return own

    return Axis(join(groups), join([ranks[i : i + block] for ranks in groups for i in range(0, len(ranks), block)]))


def numbers(rows: int, seed: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Tensor:
    """Whole numbers small enough that sums of them are exact in every dtype used here."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (rows, width), generator=generator).to(dtype)


@contextmanager
def counted_messages() -> Iterator[Callable[[], int]]:
    """Counts the messages that rows.py sends."""
    with ExitStack() as stack:
        places = [(rows, "all_gather_single"), (rows, "reduce_scatter_single"), (dist, "all_reduce")]
        places.append((dist, "all_to_all_single"))
        spies = [
            stack.enter_context(mock.patch.object(place, name, wraps=getattr(place, name))) for place, name in places
        ]
        yield lambda: sum(spy.call_count for spy in spies)


def check_all_values(groups: list[list[int]]) -> None:
    """Every op, in one run: starting one takes longer than all of these checks together."""
    size = len(groups[0])
    for block in [block for block in range(1, size + 1) if size % block == 0]:
        axis = make_axis(groups, block)
        for name in OPS if block == 1 else ["slice_replicated", "reduce_scatter_all_gather"]:
            check_values(name, axis)


def check_values(name: str, axis: Axis) -> None:
    """Forward and backward against one process, and the dot-product identity, on every case of an op."""
    op = OPS[name]
    place, size = axis.peers.index, axis.size
    # Groups side by side get data of their own: a message over the wrong group would show.
    base = 1000 * axis.peers.ranks[0]
    for case in op.shapes(size):
        xs = [
            numbers(op.rows_in(case, axis, i), base + (0 if op.one_in else i)).requires_grad_()
            for i in range(1 if op.one_in else size)
        ]
        expected = op.plain(axis, case, xs)
        ys = [numbers(len(out), base + 100 + (0 if op.one_out else i)) for i, out in enumerate(expected)]
        counted = slice(0, 1) if op.one_out else slice(None)
        total = sum((out * y).sum() for out, y in zip(expected[counted], ys[counted], strict=True))
        total.backward()

        x = xs[0 if op.one_in else place].detach().clone().requires_grad_()
        (out,) = op.call(axis, case, x)
        out.backward(ys[place])
        assert torch.equal(out, expected[place]), f"{name} {case}: forward"
        assert torch.equal(x.grad, xs[0 if op.one_in else place].grad), f"{name} {case}: backward"

        left, right = (out * ys[place]).sum(), (x * x.grad).sum()
        products = torch.stack([left / (size if op.one_out else 1), right / (size if op.one_in else 1)]).detach()
        products *= 12  # 12 is a multiple of all sizes: the quotients stay whole
        dist.all_reduce(products, group=axis.peers.group)
        assert products[0] == products[1], f"{name} {case}: <A x, y> = {products[0]}, <x, A' y> = {products[1]}"


def check_several_of_all(block: int) -> None:
    """Every op that takes several tensors."""
    axis = make_axis([list(range(dist.get_world_size()))], block)
    for name, op in OPS.items():
        if op.several:
            check_several(name, axis)


def check_several(name: str, axis: Axis) -> None:
    """A wide, a narrow and an index tensor of other dtypes travel together; the index has no gradient."""
    op = OPS[name]
    place, size = axis.peers.index, axis.size
    dtypes = [torch.float32, torch.bfloat16, torch.int32]
    for case in op.shapes(size):
        wide, narrow, index = (
            [
                numbers(op.rows_in(case, axis, i), 10 * kind + (0 if op.one_in else i), dtype, width=2 + kind // 2)
                for i in range(1 if op.one_in else size)
            ]
            for kind, dtype in enumerate(dtypes)
        )
        own = 0 if op.one_in else place
        x, weights = wide[own].clone().requires_grad_(), narrow[own].clone().requires_grad_()
        outs = op.call(axis, case, x, weights, index[own])
        for out, inputs, dtype in zip(outs, (wide, narrow, index), dtypes, strict=True):
            assert out.dtype == dtype
            assert torch.equal(out, op.plain(axis, case, inputs)[place])
        assert [out.requires_grad for out in outs] == [True, True, False]
        # An expanded gradient, as `sum()` gives, is not contiguous: messages have to be.
        # Gradients that are not contiguous: messages have to be.
        torch.autograd.backward(outs[:2], [out.new_ones(out.shape[::-1]).t() for out in outs[:2]])
        for tensor, inputs in ((x, wide), (weights, narrow)):
            leaves = [i.double().requires_grad_() for i in inputs]
            sum(out.sum() for out in op.plain(axis, case, leaves)).backward()
            assert tensor.grad.dtype == tensor.dtype
            assert torch.equal(tensor.grad.double(), leaves[own].grad), f"{name} {case}"


def check_unused_output() -> None:
    """Where one of several outputs is not used, the other's gradient still lands in its own place."""
    axis = make_axis([list(range(dist.get_world_size()))])
    weights = numbers(4, 1).requires_grad_()
    x = numbers(4, 0).requires_grad_()
    _, copied = c.copy_to_group(axis.peers, x, weights)
    copied.sum().backward()
    assert torch.equal(weights.grad, torch.full_like(weights, axis.size))
    assert x.grad is None or not x.grad.any()


def check_pairs_of_one_row() -> None:
    """A row that a rank picks for two of its experts, with a weight of each, in mixed dtypes."""
    axis = make_axis([list(range(dist.get_world_size()))])
    row, place = torch.tensor([0, 0, 2]), torch.tensor([0, 1, 1])
    by_row = Segments.of(row, 3)
    x, weights = numbers(3, 0, torch.bfloat16).requires_grad_(), numbers(3, 1, torch.float32, width=2).requires_grad_()
    rows, own = permute(axis.peers, by_row, row, place, x, weights)
    assert torch.equal(rows, x[row])
    assert torch.equal(own, weights[row, place, None])
    unpermute(axis.peers, by_row, row, rows * own).sum().backward()
    grads = torch.autograd.grad((x[row] * weights[row, place, None]).sum(), (x, weights))
    for tensor, grad in zip((x, weights), grads, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert torch.equal(tensor.grad, axis.size * grad)


def check_one_row(dtype: torch.dtype) -> None:
    """One token in the whole group, one expert for it, there and back in mixed dtypes.

    torch calls one row contiguous whatever its strides are, and its bytes may then not be viewed as another
    dtype: a row of 2H + 4 + 2 bytes (bf16) isn't whole int32s, and `sum()` gives a gradient of stride 0.
    """
    axis = make_axis([list(range(dist.get_world_size()))])
    own = 1 - axis.peers.index
    tensors = [numbers(own, 0, dtype, width=4).requires_grad_(), numbers(own, 1, torch.int32, width=1)]
    tensors.append(numbers(own, 2, dtype, width=1).requires_grad_())
    gathered = c.all_gather(axis.peers, [1, 0], *tensors)
    for seed, (out, tensor) in enumerate(zip(gathered, tensors, strict=True)):
        assert torch.equal(out, numbers(1, seed, tensor.dtype, width=tensor.shape[1]))
    x, _, weights = c.scatter_to_tp(axis.peers, *gathered)
    assert len(x) == own
    torch.autograd.backward([x.sum(), weights.sum()])
    # Both peers held the gathered row, and split gave each of them the whole gradient of it.
    for tensor in (tensors[0], tensors[2]):
        assert torch.equal(tensor.grad, torch.full_like(tensor, 2))


def count_alone() -> tuple[int, list[str]]:
    """Messages of every op, forward and backward, where each rank is its own only peer; ops that changed values."""
    axis = make_axis([[rank] for rank in range(dist.get_world_size())])
    wrong = []
    with counted_messages() as messages:
        for name, op in OPS.items():
            case = op.shapes(1)[0]
            x = numbers(op.rows_in(case, axis, 0), 0).requires_grad_()
            (out,) = op.call(axis, case, x)
            out.backward(torch.ones_like(out))
            if not (torch.equal(out, x) and torch.equal(x.grad, torch.ones_like(x))):
                wrong.append(name)
        return messages(), wrong


def count_without_gradient() -> dict[str, tuple[int, int]]:
    """Messages of forward and of backward, by op, where the input needs no gradient but what follows does."""
    axis = make_axis([list(range(dist.get_world_size()))], block=dist.get_world_size())
    counts = {}
    for name, op in OPS.items():
        case = op.shapes(axis.size)[0]
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        with counted_messages() as messages:
            (out,) = op.call(axis, case, numbers(op.rows_in(case, axis, axis.peers.index), 0))
            forward = messages()
            (out * scale).sum().backward()
            counts[name] = forward, messages() - forward
    return counts


def all_reduce_errors() -> dict[str, tuple[float, float]]:
    """`reduce_errors` by op."""
    world = dist.get_world_size()
    axis = make_axis([list(range(world))], block=world)
    return {name: reduce_errors(name, axis) for name in REDUCING}


def reduce_errors(name: str, axis: Axis) -> tuple[float, float]:
    """Mean error of the sums that an op makes, in forward or backward: reduced in bf16, and in float32."""
    op = OPS[name]
    place, size = axis.peers.index, axis.size
    case = 64 * size if op.shapes is totals else (64,) * size
    errors = []
    for dtype in (None, torch.float32):
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(op.rows_in(case, axis, i), WIDTH, generator=generator).bfloat16() for i in range(size)]
        exact = [x.double().requires_grad_() for x in (inputs[:1] if op.one_in else inputs)]
        outs = op.plain(axis, case, exact)
        ys = [torch.randn(out.shape, generator=generator).bfloat16() for out in outs]
        sum((out * y.double()).sum() for out, y in zip(outs, ys, strict=True)).backward()
        x = inputs[0 if op.one_in else place].requires_grad_()
        (out,) = op.call(axis, case, x, reduce_dtype=dtype)
        assert out.dtype == torch.bfloat16
        out.backward(ys[place])
        assert x.grad.dtype == torch.bfloat16
        if name in (
            "reduce_from_group",
            "reduce_scatter",
            "reduce_scatter_all_gather",
            "unpermute",
        ):  # sums on the way there
            errors.append((out.double() - outs[place]).abs().mean().item())
        else:
            errors.append((x.grad.double() - exact[0 if op.one_in else place].grad).abs().mean().item())
    return errors[0], errors[1]


# In pytest

WORLDS = [(world, [list(range(world))]) for world in (2, 3, 4)]
WORLDS.append((4, [[0, 2], [1, 3]]))  # peers that are not the world, nor neighbours


@pytest.mark.parametrize(("world", "groups"), WORLDS, ids=["2", "3", "4", "4-strided"])
def test_transpose(launcher: Launcher, world: int, groups: list[list[int]]) -> None:
    launcher.run(world, check_all_values, groups=groups)


@pytest.mark.sample("3")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_tensors_at_once(launcher: Launcher, world: int) -> None:
    launcher.run(world, check_several_of_all, block=2 if world == 4 else 1)


def test_an_output_nobody_uses(launcher: Launcher) -> None:
    launcher.run(2, check_unused_output)


def test_pairs_of_one_row(launcher: Launcher) -> None:
    launcher.run(2, check_pairs_of_one_row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_row(launcher: Launcher, dtype: torch.dtype) -> None:
    launcher.run(2, check_one_row, dtype=dtype)


PACKED = {
    "plain": [torch.ones(3, 4), torch.ones(3, 2, dtype=torch.int64)],
    "no rows": [torch.ones(0, 4), torch.ones(0, 2, dtype=torch.bfloat16)],
    "one row, odd bytes": [
        torch.ones(1, 4).bfloat16(),
        torch.ones(1, 1, dtype=torch.int32),
        torch.ones(1, 1).bfloat16(),
    ],
    "odd bytes": [torch.ones(2, 4).bfloat16(), torch.ones(2, 1, dtype=torch.int32), torch.ones(2, 1).bfloat16()],
    "one entry, stride 0": [torch.ones(1, 4), torch.ones(()).expand(1, 1)],
    "stride 0": [torch.ones(3, 4), torch.ones(()).expand(3, 1)],
    "a transposed column": [torch.ones(3, 4), torch.ones(1, 3).t()],
    "transposed": [torch.ones(4, 3).t(), torch.ones(2, 3).t()],
    "more dimensions": [torch.ones(3, 2, 2), torch.ones(3, 1, 5).bool()],
}


@pytest.mark.parametrize("tensors", PACKED.values(), ids=PACKED.keys())
def test_any_strides_travel(tensors: list[Tensor]) -> None:
    """What a message is made of, without sending it: into bytes and out again."""
    message = rows.pack_columns(tensors)
    assert len(message) == len(tensors[0])
    for out, tensor in zip(rows._unpack(message, tensors), tensors, strict=True):
        assert out.dtype == tensor.dtype
        assert torch.equal(out, tensor)


def test_alone_there_is_no_message(launcher: Launcher) -> None:
    assert launcher.run(2, count_alone) == [(0, [])] * 2


def test_no_gradient_no_backward_message(launcher: Launcher) -> None:
    for counts in launcher.run(2, count_without_gradient):
        assert {name: backward for name, (_, backward) in counts.items()} == dict.fromkeys(OPS, 0)
        # And the counter does count: these are the ops that send something forward.
        sending = {name for name, (forward, _) in counts.items() if forward}
        assert sending == {
            "gather_from_tp",
            "all_gather",
            "reduce_scatter",
            "reduce_scatter_all_gather",
            "reduce_from_group",
            "unpermute",
            "all_to_all",
        }


def test_reducing_in_float32_is_closer(launcher: Launcher) -> None:
    # Four ranks: a sum of two bf16 numbers is rounded once either way, and would be the same.
    for errors in launcher.run(4, all_reduce_errors):
        assert set(errors) == set(REDUCING)
        for name, (low, high) in errors.items():
            # Three roundings against one: each adds about half a unit in the last place, so on 768 entries
            # the two are well apart.
            assert high < 0.8 * low, name
