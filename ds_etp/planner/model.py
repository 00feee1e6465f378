"""Facts of a model that memory and time depend on: its weights, their sharding, and the sizes of its MoE layers.

Legend: H hidden size, I intermediate size of an expert, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ds_etp.parallel.topology import Topology
from ds_etp.planner.pipeline_partition import partition

# "whole": every rank has it; "tp": AutoTP splits it; "experts": over ep and etp; "expert rows": over ep alone, as the
# bias of a down projection, which no dimension of I runs through.
Sharding = Literal["whole", "tp", "experts", "expert rows"]


@dataclass(frozen=True)
class Weight:
    """Parameters of one size.

    Attributes:
        name: what they are, for people.
        elements: of one of them, unsplit.
        layers: the layers that have it; -1 is what comes before the first layer, the number of layers what comes
            after the last one.
        sharding: how it is split over ranks.
        multiplied: whether each token is multiplied by it. An embedding is looked up, a bias added.
        each: how many a layer has.
    """

    name: str
    elements: int
    layers: tuple[int, ...]
    sharding: Sharding
    multiplied: bool = True
    each: int = 1

    @property
    def copies(self) -> int:
        """How many the model has."""
        return self.each * len(self.layers)

    @property
    def is_expert(self) -> bool:
        """Whether it is partitioned over expert_dp, not over the dense data-parallel ranks."""
        return self.sharding in ("experts", "expert rows")

    def local(self, topology: Topology) -> int:
        """Elements of one copy on a rank."""
        divisor = {
            "whole": 1,
            "tp": topology.tp,
            "experts": topology.expert_model_parallel,
            "expert rows": topology.ep,
        }[self.sharding]
        return self.elements // divisor


@dataclass(frozen=True, eq=False)  # compared and hashed as an object: its stages are made once
class ModelFacts:
    """A model, as far as its layout goes.

    Attributes:
        name: what to call it.
        hidden, vocab, layers: H, vocabulary, number of layers.
        moe_layer_indices: which of the layers have routed experts.
        experts, per_token, columns: E, K, I.
        spare_experts: rows of the experts' weights after those of the experts (longcat_flash).
        gated: whether an expert has a gate beside its up projection.
        saved_expert_tensors: tensors of I columns an expert keeps for backward.
        router_fp32, norms_fp32: whether routers keep their input in fp32, and norms their result.
        attention_width: entries of a token's queries, keys and values together, latents included.
        output_width: entries of a token's attention output before its last projection.
        norm_width: entries of a token's queries, keys or latents that norms of attention's own go over.
        dense_columns, shared_columns: intermediate size of a layer without experts, and of a MoE layer's shared
            experts together; 0 where there are none.
        splits_attention, splits_dense, splits_shared: what AutoTP splits: attention, MLPs of layers without
            experts, shared experts.
        dense_splits: how many of a decoder block's dense parts (attention, MLP) AutoTP splits; each all-reduces its
            output over tp.
        tp_divides: sizes that tp has to divide.
        heads, key_value_heads: of attention.
        weights: all of them.
        no_tp, no_cp, no_pp: why tp, cp or pp is 1 for this model; empty where it needn't be.
        makes_logits: whether the output layer is here, as it is but in pipeline stages before the last.
    """

    name: str
    hidden: int
    vocab: int
    layers: int
    moe_layer_indices: tuple[int, ...]
    experts: int
    per_token: int
    columns: int
    gated: bool
    saved_expert_tensors: int
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
    heads: int
    key_value_heads: int
    weights: tuple[Weight, ...]
    no_tp: str = ""
    no_cp: str = ""
    no_pp: str = ""
    spare_experts: int = 0
    makes_logits: bool = True

    @property
    def moe_layers(self) -> int:
        """How many layers have routed experts."""
        return len(self.moe_layer_indices)

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

    def pipeline_stage(self, pp: int, index: int) -> ModelFacts:
        """The part of the model that a pipeline stage holds; its layers keep their numbers.

        The embedding is on the first stage, the last norm and the output layer on the last.

        Args:
            pp: how many pipeline stages there are.
            index: of the stage, from 0.
        """
        return self if pp == 1 else _pipeline_stage(self, pp, index)

    def distinct_pipeline_stages(self, pp: int) -> tuple[int, ...]:
        """Indices of pipeline stages, without those that hold as much of everything as an earlier one."""
        return _distinct_pipeline_stages(self, pp)


def _bounds(facts: ModelFacts, pp: int) -> tuple[int, ...]:
    """Layers at which pipeline stages begin and end: the first begins at -1, the last ends after the output layer."""
    sizes = [0] * (facts.layers + 2)
    for weight in facts.weights:
        for layer in weight.layers:
            sizes[layer + 1] += weight.elements * weight.each
    return tuple(bound - 1 for bound in partition(tuple(sizes), pp))


@lru_cache(maxsize=1024)
def _pipeline_stage(facts: ModelFacts, pp: int, index: int) -> ModelFacts:
    start, stop = _bounds(facts, pp)[index : index + 2]

    def within(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer for layer in layers if start <= layer < stop)

    return replace(
        facts,
        layers=len(within(tuple(range(facts.layers)))),
        moe_layer_indices=within(facts.moe_layer_indices),
        weights=tuple(
            replace(weight, layers=within(weight.layers), sharding=_sharding_in_pipeline(weight, facts.layers))
            for weight in facts.weights
        ),
        makes_logits=index == pp - 1,
    )


def _sharding_in_pipeline(weight: Weight, layers: int) -> Sharding:
    """AutoTP leaves whole what lies outside of a pipeline's layers: embedding and output layer."""
    outside = all(layer in (-1, layers) for layer in weight.layers)
    return "whole" if outside and weight.sharding == "tp" else weight.sharding


@lru_cache(maxsize=1024)
def _distinct_pipeline_stages(facts: ModelFacts, pp: int) -> tuple[int, ...]:
    found: dict[tuple[int, ...], int] = {}
    for index in range(pp):
        found.setdefault(tuple(weight.copies for weight in facts.pipeline_stage(pp, index).weights), index)
    return tuple(found.values())
