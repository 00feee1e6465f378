"""Which plan moves tokens to experts, from sizes alone: no torch, so that planners can use it too."""

from __future__ import annotations

from ds_etp.topology import Topology


def tokens_are_replicated(topology: Topology) -> bool:
    """Whether every rank of one expert-model-parallel block already holds the block's tokens.

    Tensor-parallel peers hold the same batch. A block is `ep * etp` neighbouring ranks, so it lies inside
    one tensor-parallel group exactly when `tp` is a multiple of `ep * etp`.
    """
    return topology.tp % topology.expert_model_parallel == 0


def choose_plan(topology: Topology, requested: str = "auto") -> str:
    """The plan for a topology: the requested one, or the cheapest that fits.

    Args:
        topology: sizes of both paths.
        requested: `"auto"` or the name of a plan that was checked to fit.

    Returns:
        `"replicated"` where the tokens are on every rank of the block already, else `"alltoall"`.
    """
    if requested != "auto":
        return requested
    return "replicated" if tokens_are_replicated(topology) else "alltoall"


def plan_name(topology: Topology, requested: str = "auto") -> str:
    """The plan for a topology as it is shown: `alltoall (auto)` where ds_etp has chosen it."""
    chosen = choose_plan(topology, requested)
    return f"{chosen} (auto)" if requested == "auto" else chosen
