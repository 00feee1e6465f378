"""What a planner has to know of a model: its weights, how each is split, and the sizes of its MoE layers.

Legend: H hidden size, I intermediate size of an expert, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_etp.topology import Topology

# "whole": every rank has it; "tp": AutoTP splits it; "experts": over ep and etp; "expert rows": over ep alone, as the
# bias of a down projection, which no dimension of I runs through.
Cut = Literal["whole", "tp", "experts", "expert rows"]


@dataclass(frozen=True)
class Weight:
    """Parameters of one size.

    Attributes:
        name: what they are, for people.
        elements: of one of them, unsplit.
        copies: how many the model has.
        cut: how a rank's part is cut out.
        multiplied: whether each token is multiplied by it. An embedding is looked up, a bias added.
    """

    name: str
    elements: int
    copies: int
    cut: Cut
    multiplied: bool = True

    @property
    def is_expert(self) -> bool:
        """Whether it is partitioned over expert_dp, not over the dense data-parallel ranks."""
        return self.cut in ("experts", "expert rows")

    def local(self, topology: Topology) -> int:
        """Elements of one copy on a rank."""
        divisor = {
            "whole": 1,
            "tp": topology.tp,
            "experts": topology.expert_model_parallel,
            "expert rows": topology.ep,
        }[self.cut]
        return self.elements // divisor


@dataclass(frozen=True)
class ModelFacts:
    """A model, as far as its layout goes.

    Attributes:
        name: what to call it.
        hidden, vocab, layers: H, vocabulary, number of layers.
        moe_layers: how many of the layers have routed experts.
        experts, per_token, columns: E, K, I.
        spare_experts: rows of the experts' weights after those of the experts (longcat_flash).
        gated: whether an expert has a gate beside its up projection.
        expert_keeps: tensors of I columns an expert keeps for backward.
        router_fp32, norms_fp32: whether routers keep their input in fp32, and norms their result.
        attention_width: entries of a token's queries, keys and values together, latents included.
        output_width: entries of a token's attention output before its last projection.
        norm_width: entries of a token's queries, keys or latents that norms of attention's own go over.
        dense_columns, shared_columns: intermediate size of a layer without experts, and of a MoE layer's shared
            experts together; 0 where there are none.
        splits_attention, splits_dense, splits_shared: what AutoTP splits: attention, MLPs of layers without
            experts, shared experts.
        dense_splits: how many of a layer's dense blocks AutoTP splits, each of which sums its output over tp.
        tp_divides: sizes that tp has to divide.
        no_tp: why tp is 1 for this model; empty where AutoTP splits it.
        weights: all of them.
    """

    name: str
    hidden: int
    vocab: int
    layers: int
    moe_layers: int
    experts: int
    per_token: int
    columns: int
    gated: bool
    expert_keeps: int
    router_fp32: bool
    norms_fp32: bool
    attention_width: int
    output_width: int
    norm_width: int
    dense_columns: int
    shared_columns: int
    splits_attention: bool
    splits_dense: bool
    splits_shared: bool
    dense_splits: float
    tp_divides: tuple[int, ...]
    weights: tuple[Weight, ...]
    no_tp: str = ""
    spare_experts: int = 0

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(weight.elements * weight.copies for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """Elements one token is multiplied by."""
        total = 0
        for weight in self.weights:
            if weight.multiplied:
                elements = weight.elements * weight.copies
                total += elements * self.per_token // self.experts if weight.is_expert else elements
        return total

    def takes_tp(self, tp: int) -> bool:
        """Whether attention and the other dense layers can be split over tp ranks."""
        return tp == 1 or (not self.no_tp and all(size % tp == 0 for size in self.tp_divides))
