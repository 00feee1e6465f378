"""How often the host waits for the device in one MoE layer, under every dispatcher and experts implementation.

Blocks of real families, sharded as `deepspeed.initialize` does it; outputs and gradients beside the whole block's.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.dispatch import pairs
from ds_etp.experts.build import make_shard
from ds_etp.experts.registry import read_layout
from ds_etp.experts.sharded import shard_in_place
from ds_etp.parallel.host import expand_ranges, to_device, to_host
from ds_etp.parallel.topology import Topology
from tests.dispatch.host_syncs import HostSyncs, Sync, count
from tests.dispatch.layers import data_rank, expert_groups
from tests.launcher import Launcher
from tests.models import make_model
from tests.tolerances import TENSOR

# Gate and up concatenated; interleaved with biases, transposed; no gate; as many rows for every expert.
BLOCKS = {
    "qwen3_moe": "model.layers.0.mlp",
    "gpt_oss": "model.layers.0.mlp",
    "nemotron_h": "model.layers.1.mixer",
    "llama4_text": "model.layers.0.feed_forward",
}
LENGTHS = (11, 5, 0, 7)  # of each batch


def run_block(block: Any, hidden: Tensor, weight: Tensor) -> tuple[dict[str, Tensor], list[list[Sync]]]:
    """Output and gradients of a block, and the waits of its forward and of its backward."""
    block.zero_grad()
    x = hidden.clone().requires_grad_()

    def forward() -> Tensor:
        out = block(x)
        return out[0] if isinstance(out, tuple) else out

    with HostSyncs(x, weight, block) as syncs:
        y = forward()
        in_forward = list(syncs.found)
        y.backward(weight)
    router = {f"router {name}": p.grad for name, p in block.named_parameters() if "experts" not in name}
    return {"output": y.detach(), "token grad": x.grad, **router}, [in_forward, syncs.found[len(in_forward) :]]


def waits(dispatcher: str, sizes: tuple[int, int, int]) -> dict[Any, Any]:
    """By (family, implementation, recompute, few rows): ours forward, all others' forward, and all backward."""
    tp, ep, etp = sizes
    topology = Topology(dist.get_world_size(), tp=tp, ep=ep, etp=etp)
    data, found = data_rank(topology), {}
    hidden, weight = (
        torch.randn(1, LENGTHS[data], 32, generator=torch.Generator().manual_seed(seed + data)) for seed in (0, 9)
    )
    with expert_groups(topology) as groups:
        for family, path in BLOCKS.items():
            for implementation in ("grouped_mm", "batched_mm", "eager"):
                if family == "llama4_text" and implementation != "eager":
                    continue  # it has but one
                whole = make_model(family, implementation=implementation).get_submodule(path)
                # A family's own forward may lose its graph without tokens.
                right = run_block(whole, hidden, weight)[0] if LENGTHS[data] else None
                for recompute in (False, True):
                    block, layout = deepcopy(whole), read_layout("experts", whole.experts)
                    shard = make_shard(
                        "experts",
                        block.experts,
                        layout,
                        groups,
                        dispatcher,
                        ExpertTensorParallelConfig(recompute=recompute),
                        None,
                        block,
                    )
                    shard_in_place(block.experts, shard)
                    for few in (True, False):
                        with mock.patch.object(pairs, "FEW_BYTES", pairs.FEW_BYTES if few else 0):
                            got, (forward, backward) = run_block(block, hidden, weight)
                        case = family, implementation, recompute, few
                        compare(got, right, case)
                        ours = [sync for sync in forward if sync.is_ours]
                        found[case] = ours, [sync for sync in forward if not sync.is_ours], backward
    return found


def compare(got: dict[str, Tensor], right: dict[str, Tensor] | None, case: Any) -> None:
    """The whole block's numbers: sentinels hold anything until they are masked."""
    for kind, value in got.items():
        assert torch.isfinite(value).all(), f"{case}: {kind}"
        if right is None:
            continue
        error = (value - right[kind]).abs().max() / right[kind].abs().max().clamp(min=1e-6)
        assert error <= TENSOR, f"{case}: {kind} is off by {error:.1e}"


@pytest.mark.sample("alltoall_etp_first-(2, 2, 2)-1-1", "replicated-(4, 2, 2)-1-0")
@pytest.mark.parametrize(
    ("dispatcher", "sizes", "syncs", "few"),
    [
        # The table of counts is read, once.
        ("alltoall", (1, 4, 1), 1, 1),
        ("alltoall", (1, 2, 2), 1, 1),
        ("alltoall", (2, 2, 2), 1, 1),
        ("alltoall", (4, 2, 2), 1, 1),
        ("alltoall_etp_first", (1, 2, 2), 1, 1),
        ("alltoall_etp_first", (2, 2, 2), 1, 1),
        # Sizes and counts in one table.
        ("allgather", (1, 4, 1), 1, 1),
        ("allgather", (1, 2, 2), 1, 1),
        ("allgather", (2, 1, 4), 1, 1),
        # Sizes are known: how many pairs there are is asked, unless rows are few.
        ("allgather", (4, 2, 2), 1, 0),
        ("replicated", (4, 2, 2), 1, 0),
        ("replicated", (4, 2, 1), 1, 0),
        ("replicated", (4, 1, 2), 0, 0),
    ],
    ids=str,
)
def test_waits_of_a_layer(
    launcher: Launcher, dispatcher: str, sizes: tuple[int, int, int], syncs: int, few: int
) -> None:
    """Forward; none in backward, and none that recomputing brings."""
    for by_case in launcher.run(4, waits, dispatcher=dispatcher, sizes=sizes):
        for (family, implementation, recompute, is_few), (ours, others, backward) in by_case.items():
            where = f"{family}, {implementation}, recompute {recompute}, few {is_few}"
            most = syncs
            if is_few and implementation == "grouped_mm":
                most = few
            if family == "llama4_text" and sizes[1] == 1 and dispatcher == "replicated":
                most = 1  # its forward wants as many rows for each expert: the longest's are counted
            assert len(ours) == most, f"{where}: {ours}"
            if implementation != "eager" or family == "llama4_text":
                assert not others, f"{where}: {others}"
            # A family's own loop over experts asks again when it is run again.
            assert not [sync for sync in backward if sync.is_ours or implementation != "eager"], f"{where}: {backward}"


DEVICE = torch.arange(6)


@pytest.mark.parametrize(
    ("work", "kinds"),
    [
        (lambda x: x.sum().item(), ["copies"]),
        (lambda x: bool((x > 1).any()), ["copies"]),
        (lambda x: x.tolist(), ["copies"]),
        (lambda x: x.cpu().numpy(), ["copies"]),
        (lambda x: x.view(2, 3).nonzero(), ["shapes"]),
        (lambda x: x[x > 1], ["shapes"]),
        (lambda x: torch.where(x > 1), ["shapes"]),
        (lambda x: x.masked_select(x > 1), ["shapes"]),
        (lambda x: x.bincount(), ["shapes"]),
        (lambda x: x.unique(), ["shapes"]),
        (lambda x: x.repeat_interleave(x), ["shapes"]),
        (lambda x: torch.equal(x, x + 0), ["values"]),
        (lambda x: torch.tensor([1, 2], device=x.device) + x[:2], ["pageable"]),
        (lambda x: to_host(x + 1), ["copies"]),
        (lambda x: x[to_device(to_host(x), x.device)], ["copies"]),
        (lambda x: x[expand_ranges(x.device, (to_host(x)[:2], to_host(x)[1:3]))[0]], ["copies", "copies"]),
        (lambda x: torch.nonzero_static(x, size=5), []),
        (lambda x: x.repeat_interleave(x, output_size=15), []),
        (lambda x: x.new_zeros(9).index_copy(0, x, x).sort(stable=True), []),
        (lambda x: x.split([1, 5])[1] + torch.arange(5, device=x.device), []),
    ],
)
def test_the_counter(work: Any, kinds: list[str]) -> None:
    """It sees what would wait on CUDA, and nothing in what would not."""
    assert [sync.kind for sync in count(lambda: work(DEVICE), DEVICE)[1]] == kinds


def test_a_table_that_nobody_copied_is_found() -> None:
    with pytest.raises(AssertionError, match="of tensors of the host's"):
        count(lambda: DEVICE[torch.arange(3)], DEVICE)
