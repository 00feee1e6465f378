"""What a rank's host does for one call of an all-to-all dispatcher, from counts to rows.

The tables of a large ep group are made up here, of uniform routing: no peers, no messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ds_etp.dispatch.ep_first import ep_first_plan
from ds_etp.dispatch.etp_first import etp_first_plan
from ds_etp.dispatch.routing_table import CountsExchange, RankLayout
from ds_etp.parallel.process_groups import ProcessGroupInfo
from ds_etp.parallel.topology import Topology

SIZES = (8, 32, 128)  # of ep
ORDERS = {"alltoall": ep_first_plan, "alltoall_etp_first": etp_first_plan}
# Tokens a rank. Few: kernels take no time worth mentioning then, and what is left is their launches and the host's
# arithmetic, which does not depend on how many there are.
TOKENS = 16
PER_TOKEN = 8


def host_rows(folder: str, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds of the bookkeeping of one layer's call, by ep and order; etp is 2.

    Reading the counts, the routing plan with all its index tables, and the launches of what makes them.
    """
    return [{"ep": ep, **_seconds(Topology(2 * ep, ep=ep, etp=2), repeats)} for ep in sizes]


def _seconds(topology: Topology, repeats: int) -> dict[str, float]:
    ep, etp, ranks = topology.ep, topology.etp, topology.expert_model_parallel
    layout = RankLayout(topology, tuple(range(ranks)), ranks // 2)
    exchange = CountsExchange(layout, ProcessGroupInfo(layout.ranks, layout.expert_mp_rank, None), 1)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(ranks, TOKENS, ep, generator=generator).argsort(2)[..., : min(PER_TOKEN, ep)]
    masks = torch.zeros(ranks, TOKENS, ep, dtype=torch.bool).scatter_(2, chosen, True)
    counts = masks.sum(1).numpy()
    # A checksum of any own counts, and the same one of what is seen, as there are no TP peers.
    table = np.concatenate([np.ones((ranks, 2), np.int64), np.full((ranks, 1), TOKENS), counts, counts], 1)
    group = masks.view(ep, etp * TOKENS, ep)[layout.ep_rank]
    masks_of = {"alltoall": masks[layout.expert_mp_rank], "alltoall_etp_first": group}
    result = {}
    for name, make_plan in ORDERS.items():

        def bookkeeping(make_plan: Any = make_plan, mask: torch.Tensor = masks_of[name]) -> None:
            make_plan(layout, exchange.read(table), TOKENS, mask)

        result[name] = _least(bookkeeping, repeats)
    return result


def _least(work: Callable[[], None], repeats: int) -> float:
    """Seconds of this thread's processor in the quickest of several runs: what other processes take is left out."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
