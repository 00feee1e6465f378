"""Pipelines and shared sequences in the planner: what a stage holds, what waits, what is exchanged, what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ds_etp.config.dense_rules import check_axes, check_sequence_heads, check_stages
from ds_etp.dispatch.cost import choose_dispatcher
from ds_etp.errors import ConfigError
from ds_etp.parallel.topology import Topology
from ds_etp.planner.advice import explain
from ds_etp.planner.configs import read_facts
from ds_etp.planner.hardware import Hardware
from ds_etp.planner.job import Job
from ds_etp.planner.memory import Memory, memory_of
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.pipeline_partition import partition
from ds_etp.planner.ranking import rank_layouts
from ds_etp.planner.timing import timing_of
from tests.planner.configs import PUBLISHED, values_of

HARDWARE = Hardware(32, 8, 80e9)


def facts_of(name: str) -> ModelFacts:
    return read_facts(values_of(name), name)


def lines_of(memory: Memory) -> dict[str, float]:
    return {line.name: line.bytes for line in memory.lines}


def test_stages_are_deepspeeds() -> None:
    from deepspeed.runtime.utils import partition_balanced

    draw = random.Random(0)
    for _ in range(30):
        sizes = tuple(draw.choice((0, 1, 7, draw.randint(1, 99))) for _ in range(draw.randint(2, 12)))
        stages = draw.randint(1, len(sizes) - 1)
        assert list(partition(sizes, stages)) == list(partition_balanced(list(sizes), stages)), (sizes, stages)


@pytest.mark.parametrize("name", PUBLISHED)
def test_stages_make_up_the_model(name: str) -> None:
    facts = facts_of(name)
    parts = [facts.pipeline_stage(4, index) for index in range(4)]
    assert sum(part.parameters for part in parts) == facts.parameters
    assert sum(part.layers for part in parts) == facts.layers
    assert sum((part.moe_layer_indices for part in parts), ()) == facts.moe_layer_indices
    names = [{weight.name for weight in part.weights if weight.copies} for part in parts]
    assert ["embedding" in found for found in names] == [True, False, False, False]
    assert ["output layer" in found for found in names] == [False, False, False, True]
    assert [part.makes_logits for part in parts] == [False, False, False, True]
    assert set(facts.distinct_pipeline_stages(4)) >= {0, 3}


def test_embedding_and_output_layer_stay_whole_in_pipelines() -> None:
    """AutoTP splits layers there."""
    facts, topology = facts_of("Mixtral-8x7B-v0.1"), Topology(16, tp=2, pp=2)
    outside = {"embedding", "output layer"}

    def parts(facts: ModelFacts) -> dict[str, float]:
        return {w.name: w.local(topology) / w.elements for w in facts.weights}

    plain, stage = parts(facts), parts(facts.pipeline_stage(2, 1))
    assert {name for name in plain if plain[name] != stage[name]} == {name for name in outside if plain[name] < 1}
    assert all(stage[name] == 1 for name in outside)


def test_the_first_stage_keeps_a_micro_batch_for_each_stage() -> None:
    """Mixtral's 32 layers in 4 stages of 8: bytes by hand. Of a large vocabulary, logits fill the last."""
    facts = read_facts(values_of("Mixtral-8x7B-v0.1") | {"vocab_size": 2000}, "here")
    topology, job = Topology(32, pp=4, etp=2, ep=4), Job(4096, 8, 1)
    row = 8 * 4096 * 4096 * 2
    for micro_batches, ahead in ((4, 4), (64, 4)):
        memory = memory_of(facts, topology, Job(4096, 8, 1, micro_batches=micro_batches))
        assert (memory.pipeline_stage, memory.layers) == (0, 8)
        assert lines_of(memory)["checkpoints"] == ahead * 8 * row
        assert lines_of(memory)["pipeline buffers"] == (ahead + 3) * row
        assert "logits" not in lines_of(memory)
    experts = 8 * 8 * 3 * 4096 * 14336 // 8
    dense = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 4096) + 2000 * 4096
    memory = memory_of(facts, topology, Job(4096, 8, 1, micro_batches=8))
    assert lines_of(memory)["parameters"] == 2 * (experts + dense)
    assert lines_of(memory)["optimizer"] == 12 * (dense // 8 + experts)
    whole = memory_of(facts, Topology(32, etp=2, ep=4), job)
    assert lines_of(whole)["checkpoints"] == 32 * row
    kept = memory_of(facts, topology, Job(4096, 8, 1, recompute=False, micro_batches=8))
    alone = memory_of(facts, Topology(32, etp=2, ep=4), Job(4096, 8, 1, recompute=False))
    last_norm = 8 * 4096 * 4096 * (4 + 2 + 2)
    # 4 micro batches of a quarter of the layers: as much as one of all of them.
    assert lines_of(kept)["activations"] == lines_of(alone)["activations"] - last_norm


def test_sequences_are_shared() -> None:
    """cp divides what grows with tokens, and no weight; the dense optimizer is partitioned over dp x cp."""
    facts, job = facts_of("Mixtral-8x7B-v0.1"), Job(8192, 1, 1)
    alone, shared = (lines_of(memory_of(facts, Topology(32, cp=cp, etp=2, ep=4), job)) for cp in (1, 4))
    for name in ("checkpoints", "activations", "dispatch buffers", "logits"):
        assert shared[name] == alone[name] / 4
    for name in ("parameters", "gradients", "optimizer"):
        assert shared[name] == alone[name]
    # Queries and results of 4096, keys and values of 1024 each, twice, of 2048 tokens in bf16.
    assert shared["heads"] == 2 * 2048 * (2 * 4096 + 2 * 1024) * 2
    # 16 ranks for 8 key and value heads: each of those is sent to two.
    many = lines_of(memory_of(facts, Topology(32, cp=16, etp=2, ep=4), job))
    assert many["heads"] == 2 * 512 * (2 * 4096 + 2 * 2 * 1024) * 2


def test_time_of_pipelines_and_sequences() -> None:
    facts, job = facts_of("Mixtral-8x7B-v0.1"), Job(4096, 1, 1, micro_batches=8)

    def timing(**sizes: int) -> Any:
        topology = Topology(32, **sizes)
        choice = choose_dispatcher(topology, per_token=2, experts=8, ranks_per_node=8)
        return timing_of(facts, topology, job, HARDWARE, choice.comm_volume)

    piped, plain, shared = timing(pp=4, etp=2, ep=4), timing(etp=2, ep=4), timing(cp=4, etp=2, ep=4)
    assert plain.context == plain.pipe == plain.bubble == 0
    assert piped.bubble / (piped.seconds - piped.data) == pytest.approx(3 / 11)
    assert piped.pipe == pytest.approx(8 * 2 * (4096 * 4096 * 2 / 50e9 + 30e-6))
    assert (piped.tokens, plain.tokens, shared.tokens) == (8 * 8 * 4096, 8 * 32 * 4096, 8 * 8 * 4096)
    # Forward, again, and backward; 3 of 4 parts leave the rank, four messages a layer.
    entries = 1024 * (2 * 4096 + 2 * 1024) * 3 / 4
    assert shared.context == pytest.approx(8 * 3 * 32 * (entries * 2 / 450e9 + 4 * 30e-6))
    assert shared.experts == pytest.approx(plain.experts / 4, rel=1e-6)
    assert shared.data == pytest.approx(plain.data)


def test_reasons_for_sizes_of_1() -> None:
    for name, axis, says in (
        ("gpt-oss-120b", "cp", "Ulysses does not split the number that its attention learns for each head"),
        ("DeepSeek-V3", "cp", "Ulysses takes queries, keys and values of one size a head"),
    ):
        facts = facts_of(name)
        proposals = rank_layouts(facts, HARDWARE, sequence=4096, zero_stages=(1,), cp=range(1, 9), pp=(1,))
        assert {proposal.topology.cp for proposal in proposals} == {1}
        assert f"{axis} is 1 in all layouts: {says}." in explain(facts, HARDWARE, proposals, ("tp", "cp"))
    tied = read_facts(values_of("Qwen3-30B-A3B") | {"tie_word_embeddings": True}, "here")
    proposals = rank_layouts(tied, HARDWARE, sequence=4096, zero_stages=(1,), pp=(1, 4))
    assert {proposal.topology.pp for proposal in proposals} == {1}
    assert "pp is 1 in all layouts: its embedding is its output layer." in explain(tied, HARDWARE, proposals, ("pp",))


def test_pipelines_where_nothing_else_fits() -> None:
    """Half of a 671B model's layers a rank, at ZeRO-1, need stages; and the words say what was gained."""
    facts, hardware = facts_of("DeepSeek-V3"), Hardware(128, 8, 141e9)
    proposals = rank_layouts(facts, hardware, sequence=4096, zero_stages=(0, 1), micro_batches=32, pp=range(1, 9))
    best = proposals[0]
    assert best.fits and best.topology.pp > 1
    assert any(text.startswith("Without pipelines (tp ") for text in explain(facts, hardware, proposals))


@pytest.mark.parametrize(
    ("sizes", "stage", "says"),
    [
        ({"pp": 2}, 2, "zero_optimization.stage=2 does not work with pipeline parallel size 2: "),
        ({"pp": 2, "cp": 2}, 0, "sequence parallel size=2 does not work with pipeline parallel size 2"),
    ],
)
def test_what_pipelines_refuse(sizes: dict[str, int], stage: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_axes(Topology(8, **sizes), stage)


@pytest.mark.parametrize(
    ("tp", "cp", "heads", "kv", "says"),
    [
        (1, 3, 8, 8, "sequence parallel size=3 .* 8 attention heads are not divisible by 3. Values .*: 1, 2, 4, 8"),
        (1, 4, 8, 6, "sequence parallel size=4 .* neither it nor the 6 key and value heads .*: 1, 2."),
        (2, 2, 2, 2, "tensor_parallel.autotp_size=2 with sequence parallel size 2: the model's 2 attention heads"),
        (2, 2, 8, 1, "tensor_parallel.autotp_size=2 .* 1 key and value heads are not divisible by 2"),
        (2, 4, 16, 6, "neither it nor the 3 key and value heads that tp leaves"),
    ],
)
def test_heads_that_cannot_be_shared(tp: int, cp: int, heads: int, kv: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_sequence_heads(Topology(24, tp=tp, cp=cp), heads, kv)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="pipeline parallel size=4 is more than the model's 3 layers"):
        check_stages(Topology(4, pp=4), 3)
    check_stages(Topology(4), 0)  # no pipeline, no matter


def test_half_precision_of_pipelines() -> None:
    check_axes(Topology(4, pp=2), 1, "bfloat16")
    with pytest.raises(ConfigError, match=r"fp16\.enabled=True was not tried with pipeline parallel size 2"):
        check_axes(Topology(4, pp=2), 1, "float16")
