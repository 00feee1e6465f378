"""The planner's activations against what autograd keeps in real engines, with experts cut, dealt out, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_etp.parallel.topology import Topology
from ds_etp.planner.configs import read_facts
from ds_etp.planner.job import Job
from ds_etp.planner.memory import memory_of
from tests.launcher import Launcher
from tests.sequence.runs import Sequences, engine_for
from tests.sharded import Layout

ROWS, LENGTH = 2, 128
# Wide enough that what grows with T x H and T x I outweighs indices, masks and the tables of rotary embeddings.
CHANGES = {
    "hidden_size": 128,
    "max_position_embeddings": LENGTH,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "output_router_logits": False,
    "attn_implementation": "sdpa",
}
# DeepSeek has dimensions of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256, "num_local_experts": 8},
    "qwen3_moe": {"num_key_value_heads": 4, "moe_intermediate_size": 192, "num_experts": 8, "head_dim": 32},
    "gpt_oss": {
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "head_dim": 32,
        "attn_implementation": "eager",  # it has no sdpa
    },
    # Values as wide as keys: with others torch's sdpa on the CPU keeps scores.
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "intermediate_size": 384,
        "moe_intermediate_size": 192,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 16,
    },
    "qwen2_moe": {"num_key_value_heads": 8, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 256},
}


def recipe_of(family: str) -> Sequences:
    # A small vocabulary: of logits autograd keeps fewer bytes than a step has at its peak.
    return Sequences(family, changes=tuple((CHANGES | FAMILIES[family]).items()), implementation="grouped_mm")


def kept_bytes(recipe: Sequences, layout: Layout) -> int:
    """Bytes that autograd keeps of a forward pass, weights apart."""
    with engine_for(recipe, layout) as engine:
        return _kept_by(engine, layout)


def _kept_by(engine: Any, layout: Layout) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    kept: dict[int, Tensor] = {}
    scores: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        # Of eager attention, scores are left out: the planner is about attention that keeps none.
        if tensor.dim() == 4 and tensor.shape[-2] == LENGTH and tensor.shape[-1] in (LENGTH, LENGTH + 1):
            scores.add(place)
        if place not in weights:
            kept[place] = tensor  # alive, so that no other tensor gets its place
        return tensor

    generator = torch.Generator().manual_seed(torch.distributed.get_rank() // layout.tp)
    ids = torch.randint(0, 96, (ROWS, LENGTH // layout.sp), generator=generator)
    positions = torch.arange(ids.shape[1]) + torch.distributed.get_rank() % layout.sp * ids.shape[1]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions.expand_as(ids).contiguous()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine(**batch).loss
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in scores)
    engine.backward(loss)  # peers are in it too
    return total


LAYOUTS = [
    Layout(world=2, dtype="bf16"),
    Layout(world=2, etp=2, dtype="bf16"),
    Layout(world=2, ep=2, dtype="bf16"),
    Layout(world=2, tp=2, etp=2, dtype="bf16"),
]


SHARED = Layout(world=2, sp=2, etp=2, dtype="bf16")  # each sequence by two ranks: Ulysses


@pytest.mark.sample(1, 6, 8, 15, 18, 20)
@pytest.mark.parametrize(
    ("family", "layout"),
    [*((family, layout) for family in FAMILIES for layout in LAYOUTS), ("mixtral", SHARED)],
    ids=str,
)
def test_activations_are_within_a_tenth(launcher: Launcher, family: str, layout: Layout) -> None:
    recipe = recipe_of(family)
    facts = read_facts(recipe.model().config.to_dict(), family)
    topology = Topology(layout.world, tp=layout.tp, cp=layout.sp, etp=layout.etp, ep=layout.ep)
    memory = memory_of(facts, topology, Job(LENGTH, ROWS, 1, recompute=False))
    planned = sum(line.bytes for line in memory.lines if line.name in ("activations", "dispatch buffers"))
    results = launcher.run(2, kept_bytes, recipe=recipe, layout=layout)
    logits = ROWS * LENGTH // layout.sp * facts.vocab * 4  # of them autograd keeps the log-softmax in fp32
    # Planned for uniform routing: of dealt-out experts one rank has more tokens, the other fewer.
    assert sum(results) / len(results) == pytest.approx(planned + logits, rel=0.1)
