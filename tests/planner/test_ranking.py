"""Layouts the planner proposes: all of them work, the best is first, and the words say what the numbers do."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_etp.config.block import check_dispatcher, check_layer, parse_block, resolve
from ds_etp.config.deepspeed import autotp_size, zero_stage
from ds_etp.config.dense_rules import check_axes, check_sequence_heads, check_stages
from ds_etp.config.host_rules import check_host_options
from ds_etp.errors import ConfigError
from ds_etp.parallel.topology import GROUP_KINDS, Topology
from ds_etp.planner.advice import explain
from ds_etp.planner.configs import read_facts
from ds_etp.planner.hardware import Hardware, check_hardware, parse_bytes, with_links
from ds_etp.planner.model import ModelFacts
from ds_etp.planner.ranking import Proposal, ds_config, rank_layouts, script_notes
from tests.planner.configs import PUBLISHED, values_of


def check(proposal: Proposal, facts: ModelFacts) -> None:
    """What `ds-etp check` and the engine check, on the JSON a proposal is written as."""
    config, topology = ds_config(proposal), proposal.topology
    block = parse_block(config)
    assert block is not None
    check_host_options(config, topology.world)
    # What the file can't hold is given to `check` beside it.
    assert resolve(block, world=topology.world, tp=autotp_size(config), cp=topology.cp, pp=topology.pp) == topology
    check_dispatcher(block, topology)
    check_axes(topology, zero_stage(config))
    check_stages(topology, facts.layers)
    check_sequence_heads(topology, facts.heads, facts.key_value_heads)
    assert proposal.job.sequence % topology.cp == 0
    notes = script_notes(proposal)
    assert len(notes) == (topology.cp > 1) + (topology.pp > 1)
    for size, note in zip(proposal.script_axes.items(), notes, strict=True):
        assert note.startswith(f"{size[0]} {size[1]} is set up by the script")
    check_layer(
        topology,
        "experts",
        num_experts=facts.experts,
        intermediate_size=facts.columns,
        spare_experts=facts.spare_experts,
    )


def sizes(most: int) -> st.SearchStrategy[int]:
    """Sizes with many divisors, and any others."""
    return st.one_of(
        st.sampled_from([size for size in (8, 16, 60, 96, 128, 768, 2880) if size <= most]), st.integers(1, most)
    )


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Configs of any family, with sizes that need not divide each other."""
    heads = draw(sizes(16))
    groups = draw(st.sampled_from([size for size in range(1, heads + 1) if heads % size == 0]))
    experts = draw(sizes(128))
    return {
        "model_type": draw(
            st.sampled_from(["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"])
        ),
        "hidden_size": heads * draw(st.integers(1, 16)),
        "num_hidden_layers": draw(st.integers(2, 5)),
        "first_k_dense_replace": draw(st.integers(0, 1)),
        "vocab_size": draw(sizes(5000)),
        "intermediate_size": draw(sizes(3000)),
        "moe_intermediate_size": draw(sizes(3000)),
        "shared_expert_intermediate_size": draw(sizes(3000)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "q_lora_rank": draw(st.sampled_from([None, 24])),
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "tie_word_embeddings": draw(st.booleans()),
    }


AXES = st.integers(1, 6).map(lambda most: range(1, most + 1))


@settings(max_examples=30, deadline=None)
@given(models(), sizes(96), st.integers(1, 16), sizes(5000), st.booleans(), st.integers(1, 8), AXES, AXES)
def test_every_proposal_works(
    values: dict[str, Any],
    gpus: int,
    per_node: int,
    sequence: int,
    again: bool,
    micro_batches: int,
    cp: range,
    pp: range,
) -> None:
    facts = read_facts(values, "here")
    per_node = max(size for size in range(1, min(per_node, gpus) + 1) if gpus % size == 0)
    hardware = Hardware(gpus, per_node, 1e9)
    options: dict[str, Any] = {"recompute": again, "micro_batches": micro_batches, "cp": cp, "pp": pp}
    proposals = rank_layouts(facts, hardware, sequence=sequence, **options)
    for proposal in proposals:
        check(proposal, facts)
        assert all(line.bytes >= 0 for line in proposal.memory.lines)
        assert proposal.timing.seconds > 0
    fits = [proposal.fits for proposal in proposals]
    assert fits == sorted(fits, reverse=True)
    assert explain(facts, hardware, proposals, ("tp", "cp", "pp"))


@settings(max_examples=60, deadline=None)
@given(models(), sizes(16), st.integers(1, 4), st.integers(1, 4))
def test_no_layout_is_forgotten(values: dict[str, Any], gpus: int, cp: int, pp: int) -> None:
    """Sizes found by trying them all against the checks."""
    facts = read_facts(values, "here")
    cp, pp = (1 if facts.no_cp else cp), (1 if facts.no_pp else pp)
    found = set()
    with suppress(ConfigError):  # "no layout", which the checks then say of all of them
        hardware = Hardware(gpus, gpus, 1e9)
        proposals = rank_layouts(facts, hardware, sequence=60, zero_stages=(1,), cp=(cp,), pp=(pp,))
        found = {(p.topology.tp, p.topology.etp, p.topology.ep) for p in proposals}
        assert len(found) == len(proposals)
    sizes = range(1, gpus + 1)
    works = set()
    for tp, etp, ep in ((tp, etp, ep) for tp in sizes for etp in sizes for ep in sizes):
        try:
            topology = Topology(gpus, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
            check_axes(topology, 1)
            check_stages(topology, facts.layers)
            check_sequence_heads(topology, facts.heads, facts.key_value_heads)
            check_layer(topology, "experts", num_experts=facts.experts, intermediate_size=facts.columns)
        except ConfigError:
            continue
        if facts.takes_tp(tp):
            works.add((tp, etp, ep))
    assert found == works


@pytest.mark.parametrize("name", PUBLISHED)
def test_512_gpus_take_less_than_2_seconds(name: str) -> None:
    start = time.process_time()
    facts, hardware = read_facts(values_of(name), name), Hardware(512, 8, 80e9)
    proposals = rank_layouts(facts, hardware, sequence=4096)
    explain(facts, hardware, proposals)
    assert time.process_time() - start < 2
    assert proposals[0].fits
    for proposal in proposals[::7]:
        check(proposal, facts)


def ranked(name: str, gpus: int, memory: float = 80e9, **options: Any) -> tuple[ModelFacts, Hardware, list[Proposal]]:
    facts, hardware = read_facts(values_of(name), name), Hardware(gpus, min(gpus, 8), memory)
    return facts, hardware, rank_layouts(facts, hardware, sequence=4096, **options)


def test_many_small_experts_are_dealt_out() -> None:
    """Qwen3's 768 columns on 8 GPUs: cut in 8, a tile of 128 is filled to three quarters; dealt out, to the full."""
    facts, hardware, proposals = ranked("Qwen3-30B-A3B", 16)
    best = proposals[0].topology
    assert (best.etp, best.ep) == (1, 8)
    sentences = explain(facts, hardware, proposals)
    assert sentences[0].startswith("EP is the right tool here")
    alone = next(sentence for sentence in sentences if sentence.startswith("ETP alone"))
    assert "products reach 64% of the rate, with 96 columns an expert" in alone


def test_few_large_experts_are_cut() -> None:
    """Mixtral's 8 experts on 64 GPUs: EP alone leaves every shard on 8 ranks, whose gradients cross the network."""
    facts, hardware, proposals = ranked("Mixtral-8x7B-v0.1", 64)
    best = proposals[0].topology
    assert (best.etp, best.ep) == (4, 8)
    sentences = explain(facts, hardware, proposals)
    assert sentences[0].startswith("ETP and EP together")
    alone = next(sentence for sentence in sentences if sentence.startswith("EP alone"))
    assert "8 ranks share the gradients of 5,637,144,576 expert weights, against 2 of 1,409,286,144" in alone


def test_experts_that_can_only_be_cut() -> None:
    """One expert of 7 can't be dealt out to 8 ranks, and together they don't fit."""
    values = values_of("Mixtral-8x7B-v0.1") | {"num_local_experts": 7}
    facts, hardware = read_facts(values, "here"), Hardware(8, 8, 80e9)
    proposals = rank_layouts(facts, hardware, sequence=1024, zero_stages=(1,))
    assert {p.topology.ep for p in proposals} == {1}
    facts, hardware = read_facts(values | {"num_hidden_layers": 16}, "here"), Hardware(8, 8, 80e9)
    proposals = rank_layouts(facts, hardware, sequence=1024, zero_stages=(1,))
    assert proposals[0].fits and proposals[0].topology.etp == 8
    sentences = explain(facts, hardware, proposals)
    assert sentences[0].startswith("ETP is the right tool here")
    assert any(text.startswith("experts whole on every rank") and "does not fit" in text for text in sentences)


def test_why_attention_is_not_split() -> None:
    facts = read_facts(values_of("Qwen3-30B-A3B") | {"tie_word_embeddings": True}, "here")
    hardware = Hardware(16, 8, 80e9)
    proposals = rank_layouts(facts, hardware, sequence=1024)
    assert {proposal.topology.tp for proposal in proposals} == {1}
    assert "tp is 1 in all layouts: its embedding is its output layer." in explain(facts, hardware, proposals)


def test_where_nothing_fits() -> None:
    facts, hardware, proposals = ranked("DeepSeek-V3", 8)
    assert not any(proposal.fits for proposal in proposals)
    peaks = [proposal.memory.peak for proposal in proposals if proposal.aligned]
    assert peaks == sorted(peaks)
    assert explain(facts, hardware, proposals)[0].startswith("No layout fits: the smallest, tp 1")


def test_grouped_mm_alignment_is_marked() -> None:
    """gpt-oss has 2880 columns: 16 parts of 180 aren't multiples of 8."""
    facts, hardware, proposals = ranked("gpt-oss-120b", 64)
    unaligned = {p.topology.etp for p in proposals if not p.aligned}
    assert unaligned == {16, 32, 64}
    marked = [place for place, p in enumerate(proposals) if p.fits and not p.aligned]
    plain = [place for place, p in enumerate(proposals) if p.fits and p.aligned]
    assert min(marked) > max(plain)
    assert any("so not etp 16, 32, 64 (180, 90, 45 columns)" in text for text in explain(facts, hardware, proposals))


def test_stages_trade_memory_for_messages() -> None:
    _, _, proposals = ranked("Mixtral-8x7B-v0.1", 64)
    by_stage = {p.job.zero_stage: p for p in proposals if (p.topology.tp, p.topology.etp, p.topology.ep) == (1, 2, 8)}
    peaks = [by_stage[stage].memory.peak for stage in range(3)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    assert by_stage[3].timing.data > by_stage[2].timing.data


def test_written_config_is_one_deepspeed_reads() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    _, _, proposals = ranked("Mixtral-8x7B-v0.1", 64)
    for proposal in proposals[:20]:
        config = ds_config(proposal)
        read = DeepSpeedConfig({**config, "train_batch_size": 1})
        assert read.zero_config.stage == proposal.job.zero_stage
        assert read.train_micro_batch_size_per_gpu == 1
        if proposal.job.zero_stage:
            assert read.zero_config.reduce_bucket_size == proposal.job.bucket


@pytest.mark.parametrize(
    ("topology", "leaves"),
    [
        (Topology(16, tp=8, etp=2, ep=4), {"dp", "expert_dp"}),
        (Topology(16, tp=2, etp=4, ep=4), {"dp", "ep", "expert_model_parallel"}),
        (Topology(16, tp=4, etp=16), {"dp", "expt_tp", "expert_model_parallel"}),
        (Topology(32, tp=4, pp=4, etp=2, ep=2), {"pp"}),
        (Topology(8, tp=2, etp=2, ep=2), set()),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else str(value),  # sets have no order
)
def test_which_groups_leave_a_node(topology: Topology, leaves: set[str]) -> None:
    """The arithmetic against the ranks themselves."""
    hardware = Hardware(topology.world, 8, 1.0)
    by_ranks = {kind for kind in GROUP_KINDS if any(len({rank // 8 for rank in g}) > 1 for g in topology.groups(kind))}
    assert {kind for kind in GROUP_KINDS if hardware.leaves_node(topology, kind)} == by_ranks == leaves


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("80 gb", 80e9), ("64GiB", 64 * 2**30), ("1.5TB", 1.5e12), ("141e9", 141e9), ("24000 MB", 24e9)],
)
def test_amounts(text: str, size: float) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-80GB", "0GB", "1.2.3GB", "nan"])
def test_no_amounts(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory="):
        parse_bytes(text, "--memory")


def test_links() -> None:
    hardware = with_links(Hardware(8, 8, 1.0), "inter=25GB/s, intra=900")
    assert (hardware.intra, hardware.inter) == (900e9, 25e9)
    assert with_links(Hardware(8, 8, 1.0), "inter=12.5").intra == Hardware(8, 8, 1.0).intra
    for wrong in ("between=5GB", "inter", "inter=fast", ""):
        with pytest.raises(ConfigError, match="--link="):
            with_links(hardware, wrong)
    with pytest.raises(ConfigError, match="do not divide 12 GPUs"):
        check_hardware(Hardware(12, 8, 1.0))
