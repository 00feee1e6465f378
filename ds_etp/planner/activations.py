"""Activation memory: bytes of a decoder layer that autograd saves for backward.

Legend: T tokens of a rank's micro batch, t = T / tp tokens it owns, H hidden size, I intermediate size of an expert,
E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_etp.parallel.topology import Topology
from ds_etp.planner.job import Job
from ds_etp.planner.model import ModelFacts


@dataclass(frozen=True)
class Activations:
    """Bytes of one layer that are kept for backward.

    Attributes:
        every: attention and norms, of any layer.
        dense: the MLP of a layer without experts.
        experts: shared and routed experts of a MoE layer, between their first and their last product.
        dispatch: the rows routed experts are called with, and their results.
    """

    every: float
    dense: float
    experts: float
    dispatch: float

    @property
    def largest(self) -> float:
        """Of any one layer, without `dispatch`."""
        return self.every + max(self.dense, self.experts)


def activations(facts: ModelFacts, topology: Topology, job: Job) -> Activations:
    """What autograd keeps of transformers' layers: norms in fp32, sdpa or flash attention, `grouped_mm` experts."""
    tokens, size = job.tokens(topology), job.itemsize
    attention_tp = topology.tp if facts.splits_attention else 1
    dense_tp = topology.tp if facts.splits_dense else 1
    shared_tp = topology.tp if facts.splits_shared else 1
    moe = facts.moe_layers  # a pipeline stage may have none
    every: float = 2 * norm_saved_bytes(facts, tokens, job)
    every += tokens * facts.norm_width * (size + 4) / attention_tp
    every += tokens * (facts.attention_width + facts.output_width) * size / attention_tp
    # Gate and up, the activated gate, and the product that goes down.
    mlp = tokens * 4 * size
    # A group of ep * etp expert ranks owns t tokens each and has K / ep assignments to an ep index for each of them.
    rows = tokens / topology.tp * topology.etp * facts.per_token
    routed = rows * facts.columns / topology.etp * facts.saved_expert_tensors * size
    router = tokens * facts.hidden * 4 if facts.router_fp32 else 0
    return Activations(
        every=every,
        dense=mlp * facts.dense_columns / dense_tp if facts.layers > moe else 0,
        experts=mlp * facts.shared_columns / shared_tp + routed + router if moe else 0,
        dispatch=2 * rows * facts.hidden * size if moe else 0,
    )


def exchanged_width(facts: ModelFacts, topology: Topology) -> float:
    """Entries of a token's queries, keys, values and results that Ulysses exchanges, on one of the tp ranks.

    Where ranks outnumber key and value heads, those are repeated.
    """
    tp = topology.tp if facts.splits_attention else 1
    keys_and_values = facts.attention_width - facts.output_width
    repeated = max(1, topology.cp * tp // facts.key_value_heads)
    return (2 * facts.output_width + keys_and_values * repeated) / tp


def norm_saved_bytes(facts: ModelFacts, tokens: int, job: Job) -> int:
    """Bytes a norm keeps: its input in fp32, what it makes of it, and that times its weight."""
    return tokens * facts.hidden * (4 + (4 if facts.norms_fp32 else job.itemsize) + job.itemsize)
