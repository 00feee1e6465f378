"""How many ranks share a node."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def ranks_per_node(device: torch.device) -> int:
    """Ranks that share a node: the fewest that any rank's launcher says, so that all ranks choose alike."""
    named = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")]
    local = next((int(value) for value in named if value.isdecimal() and int(value)), dist.get_world_size())
    fewest = torch.tensor(local, device=device)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    return int(fewest)
