"""Rows and bytes that one MoE layer really sends under each dispatcher, recorded, and the formulas beside them.

Experts are left out: what travels doesn't depend on them.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.recorder import Recording, record
from ds_etp.dispatch.cost import choose_dispatcher, comm_volume, megatron_rows, tokens_are_replicated
from ds_etp.parallel.topology import Topology

EXPERTS = 64
HIDDEN = 64
OWNED = 1024  # tokens of each rank: chance, and sections padded to the longest, then stay below 2%


def topology_of(sizes: tuple[int, int, int]) -> Topology:
    """The smallest world for (tp, ep, etp)."""
    tp, ep, etp = sizes
    return Topology(max(tp, ep * etp), tp=tp, ep=ep, etp=etp)


def recorded(sizes: list[int], per_token: int, folder: str, owned: int = OWNED) -> dict[str, Any]:
    """What this rank sends, by dispatcher: forward and backward rows and bytes per owned token, and collectives.

    Rows of the gather over tp, which attention needs in any case, are counted apart. An all-reduce over the
    tensor-parallel group is a merge and that gather in one.
    """
    import torch.distributed as dist
    from deepspeed.utils import groups as host

    from ds_etp.dispatch.registry import DISPATCHERS
    from ds_etp.parallel.process_groups import ExpertGroups

    topology = topology_of((sizes[0], sizes[1], sizes[2]))
    if topology.tp > 1:
        host._init_tp_mesh_device(tensor_model_parallel_size=topology.tp)
    groups = ExpertGroups(topology)
    generator = torch.Generator().manual_seed(dist.get_rank() // topology.tp)
    tokens = owned * topology.tp
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    index = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :per_token]
    scores = torch.rand(tokens, per_token, generator=generator)
    tp_group = groups.tp.group.group_name if groups.tp.group is not None else None
    results = {}
    for name, plan_class in DISPATCHERS.items():
        if name == "replicated" and not tokens_are_replicated(topology):
            continue
        dispatcher = plan_class(groups, EXPERTS)
        x, weights = hidden.clone().requires_grad_(), scores.clone().requires_grad_()
        with record() as forward:
            rows = dispatcher.dispatch(x, index, weights)
            y = dispatcher.combine(rows.x * rows.weights.sum(1, keepdim=True), rows)
        with record() as backward:
            y.square().sum().backward()
        row_count, tp_rows = _rows(forward, tp_group)
        results[name] = {
            "rows": row_count / owned,
            "tp_rows": tp_rows / owned,
            "backward_rows": sum(_rows(backward, tp_group)) / owned,
            "bytes": (forward.bytes + backward.bytes) / owned,
            "collectives": len(forward.messages) + len(backward.messages),
        }
    groups.destroy()
    return results


def _rows(recording: Recording, tp_group: str | None) -> tuple[float, float]:
    """Rows sent for the experts, and for the gather over tp."""
    expert = attention = 0.0
    for message in recording.messages:
        if message.name == "all_reduce":
            expert, attention = expert + message.rows / 2, attention + message.rows / 2
        elif message.group == tp_group:
            attention += message.rows
        else:
            expert += message.rows
    return expert, attention


def wire_rows(run: Any, layouts: Any, per_tokens: Any, owned: int = OWNED) -> list[dict[str, Any]]:
    """A row for every layout, K and dispatcher: recorded means over ranks beside the formulas.

    Args:
        run: `run(world, function, **arguments)`, on real processes.
    """
    table = []
    for sizes in layouts:
        topology = topology_of(sizes)
        for per_token in per_tokens:
            by_rank = run(
                topology.world, "benchmarks.traffic:recorded", sizes=list(sizes), per_token=per_token, owned=owned
            )
            chosen = choose_dispatcher(topology, per_token=per_token, experts=EXPERTS).dispatcher
            for dispatcher in by_rank[0]:
                expected = comm_volume(dispatcher, topology, per_token=per_token, experts=EXPERTS)
                means = {
                    key: sum(rank[dispatcher][key] for rank in by_rank) / len(by_rank) for key in by_rank[0][dispatcher]
                }
                table.append(
                    {
                        "layout": list(sizes),
                        "world": topology.world,
                        "per_token": per_token,
                        "dispatcher": dispatcher,
                        "auto": dispatcher == chosen,
                        **means,
                        "formula": expected.total,
                        "formula_collectives": expected.collectives,
                        "megatron_alltoall": megatron_rows("alltoall", topology, per_token),
                        "megatron_allgather": megatron_rows("allgather", topology, per_token),
                    }
                )
    return table
