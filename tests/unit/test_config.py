"""The config block: parsing, tiling, host options, layers. Each error names key, value, rule and what works."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ds_etp.config.block import (
    DISPATCHERS,
    ExpertTensorParallelConfig,
    check_block_name,
    check_dispatcher,
    check_layer,
    layout_table,
    parse_block,
    resolve,
)
from ds_etp.config.deepspeed import autotp_size
from ds_etp.config.host_rules import HOST_RULES, REMOVED_BLOCKS, REMOVED_ZERO_KEYS, check_host_options
from ds_etp.config.monitor import report_interval
from ds_etp.errors import ConfigError
from ds_etp.parallel.topology import Topology

KEYS = (
    "Keys that work: enabled, etp_size, ep_size, dispatcher, reduce_dtype, recompute, overlap, replicate_lm_head, "
    "replica_check_interval, allow_optimizer, monitor_router, monitor_interval, async_save, inter_node_cost."
)
ETP_RULE = 'is not a size: a whole number of at least 1 is needed. Values that work: "auto" (= tp), 1, 2, 3, ....'
EP_RULE = "is not a size: a whole number of at least 1 is needed. Values that work: 1, 2, 3, ...."
DTYPE_RULE = "is not a dtype that partial sums can be reduced in. Values that work: auto, fp32."
WEIGHT_RULE = (
    "is not a cost of links between nodes, relative to those inside: at least 1 is needed. "
    "Values that work: 1, 8, 12.5."
)
DISPATCHER_RULE = "is not a dispatcher. Values that work: auto, replicated, allgather, alltoall, alltoall_etp_first."


def parsed(**block: Any) -> ExpertTensorParallelConfig:
    result = parse_block({"expert_tensor_parallel": block})
    assert result is not None
    return result


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as info:
        call(*args, **kwargs)
    return str(info.value)


# Parsing


@pytest.mark.parametrize(
    ("interval", "steps_per_print", "expected"),
    [("auto", 5, 5), ("auto", None, 100), ("auto", float("inf"), 100), (3, 5, 3)],
)
def test_steps_between_reports(interval: int | str, steps_per_print: float | None, expected: int) -> None:
    """accelerate sets steps_per_print to infinity."""
    assert report_interval(interval, steps_per_print) == expected


def test_an_empty_block_is_on_with_defaults() -> None:
    block = parsed()
    assert block.model_dump() == {
        "enabled": True,
        "etp_size": "auto",
        "ep_size": 1,
        "dispatcher": "auto",
        "reduce_dtype": "auto",
        "recompute": False,
        "overlap": False,
        "replicate_lm_head": "auto",
        "replica_check_interval": 100,
        "allow_optimizer": False,
        "monitor_router": False,
        "monitor_interval": "auto",
        "async_save": False,
        "inter_node_cost": 8.0,
    }


def test_every_key_is_read() -> None:
    block = parsed(enabled=True, etp_size=4, ep_size=2, dispatcher="alltoall", reduce_dtype="fp32")
    assert (block.etp_size, block.ep_size, block.dispatcher, block.reduce_dtype) == (4, 2, "alltoall", "fp32")


def test_the_block_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parsed().ep_size = 2


@pytest.mark.parametrize("dispatcher", ["auto", *DISPATCHERS])
def test_plans_that_work(dispatcher: str) -> None:
    assert parsed(dispatcher=dispatcher).dispatcher == dispatcher


@pytest.mark.parametrize(
    "ds_config",
    [
        {},
        {"train_batch_size": 8, "expert_parallel": {"enabled": True}, "tensor_parallel": {}},
        {"expert_tensor_parallel": {"enabled": False, "etp_size": 4}},
        {"expert_tensor_parallel": {"enabled": False, "dispatcher": "allgather"}},
    ],
)
def test_none_when_absent_or_off(ds_config: dict[str, object]) -> None:
    assert parse_block(ds_config) is None


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"etp_size": True}, f"expert_tensor_parallel.etp_size=True {ETP_RULE}"),
        ({"etp_size": 2.0}, f"expert_tensor_parallel.etp_size=2.0 {ETP_RULE}"),
        ({"etp_size": "2"}, f"expert_tensor_parallel.etp_size='2' {ETP_RULE}"),
        ({"etp_size": 0}, f"expert_tensor_parallel.etp_size=0 {ETP_RULE}"),
        ({"etp_size": None}, f"expert_tensor_parallel.etp_size=None {ETP_RULE}"),
        ({"ep_size": "auto"}, f"expert_tensor_parallel.ep_size='auto' {EP_RULE}"),
        ({"ep_size": True}, f"expert_tensor_parallel.ep_size=True {EP_RULE}"),
        ({"ep_size": -1}, f"expert_tensor_parallel.ep_size=-1 {EP_RULE}"),
        ({"enabled": "yes"}, "expert_tensor_parallel.enabled='yes' is not a boolean. Values that work: true, false."),
        ({"enabled": 1}, "expert_tensor_parallel.enabled=1 is not a boolean. Values that work: true, false."),
        ({"dispatcher": "ring"}, f"expert_tensor_parallel.dispatcher='ring' {DISPATCHER_RULE}"),
        (
            {"recompute": 1},
            "expert_tensor_parallel.recompute=1 is not a boolean. Values that work: true, false.",
        ),
        ({"inter_node_cost": 0.5}, f"expert_tensor_parallel.inter_node_cost=0.5 {WEIGHT_RULE}"),
        ({"inter_node_cost": "8"}, f"expert_tensor_parallel.inter_node_cost='8' {WEIGHT_RULE}"),
        ({"inter_node_cost": float("inf")}, f"expert_tensor_parallel.inter_node_cost=inf {WEIGHT_RULE}"),
        (
            {"replicate_lm_head": "yes"},
            "expert_tensor_parallel.replicate_lm_head='yes' is neither a boolean nor \"auto\". Values that work: "
            '"auto", true, false.',
        ),
        (
            {"replica_check_interval": -1},
            "expert_tensor_parallel.replica_check_interval=-1 is not a number of steps: a whole number is needed. "
            "Values that work: 0 (never), 1, 100, ....",
        ),
        (
            {"monitor_router": "experts"},
            "expert_tensor_parallel.monitor_router='experts' is neither a boolean nor \"layers\". "
            'Values that work: false, true, "layers" (without the tokens of each expert).',
        ),
        (
            {"monitor_router": True},
            "expert_tensor_parallel.monitor_router=True writes to DeepSpeed's monitors, and none is enabled. "
            'What works beside it: "tensorboard": {"enabled": true} or "wandb": {"enabled": true} or '
            '"csv_monitor": {"enabled": true} or "comet": {"enabled": true}, at the top level of the same config.',
        ),
        (
            {"monitor_interval": 0},
            "expert_tensor_parallel.monitor_interval=0 is not a number of steps of at least 1. "
            'Values that work: "auto" (= steps_per_print), 1, 10, ....',
        ),
        ({"reduce_dtype": "bf16"}, f"expert_tensor_parallel.reduce_dtype='bf16' {DTYPE_RULE}"),
        (
            {"etp_sise": 2},
            f"expert_tensor_parallel.etp_sise=2 is not a key of this block: did you mean 'etp_size'? {KEYS}",
        ),
        (
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel.expert_tensor_parallel_size=2 is not a key of this block: "
            f"did you mean 'etp_size'? {KEYS}",
        ),
        (
            {"autoep_size": 2},
            f"expert_tensor_parallel.autoep_size=2 is not a key of this block: did you mean 'ep_size'? {KEYS}",
        ),
        ({"Enable": 1}, f"expert_tensor_parallel.Enable=1 is not a key of this block: did you mean 'enabled'? {KEYS}"),
        ({"zzz": 1}, f"expert_tensor_parallel.zzz=1 is not a key of this block. {KEYS}"),
        ({"enabled": False, "zzz": 1}, f"expert_tensor_parallel.zzz=1 is not a key of this block. {KEYS}"),
    ],
)
def test_wrong_keys_and_values(block: dict[str, object], expected: str) -> None:
    assert message(parse_block, {"expert_tensor_parallel": block}) == expected


@pytest.mark.parametrize("block", [None, True, 2, "on", [2]])
def test_the_block_is_an_object(block: object) -> None:
    assert message(parse_block, {"expert_tensor_parallel": block}) == (
        f"expert_tensor_parallel={block!r} is not an object. "
        'Values that work: {}, {"etp_size": 2}, {"enabled": false}.'
    )


@pytest.mark.parametrize(
    "key",
    [
        "expert_tensor_paralel",
        "expert_tensor_parallelism",
        "expert-tensor-parallel",
        "Expert_Tensor_Parallel",
        "expertTensorParallel",
        "experts_tensor_parallel",
        "expert_tensor_parallel_size",
    ],
)
def test_a_misspelt_block_is_refused(key: str) -> None:
    expected = (
        f"{key}={{}} is not a key of DeepSpeed or ds_etp: did you mean 'expert_tensor_parallel'? "
        "Keys that work: expert_tensor_parallel."
    )
    assert message(check_block_name, {key: {}}) == expected
    assert message(parse_block, {key: {}, "expert_tensor_parallel": {}}) == expected


@pytest.mark.parametrize("key", ["expert_parallel", "tensor_parallel", "sequence_parallel_size", "my_own_block"])
def test_other_keys_pass(key: str) -> None:
    check_block_name({key: {}, "expert_tensor_parallel": {}})


# Tiling the world


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_auto_takes_tp(tp: int) -> None:
    assert resolve(parsed(), world=8, tp=tp) == Topology(world=8, tp=tp, etp=tp)


def test_every_size_reaches_the_topology() -> None:
    expected = Topology(world=32, tp=2, cp=2, pp=2, etp=4, ep=2)
    assert resolve(parsed(etp_size=4, ep_size=2), world=32, tp=2, cp=2, pp=2) == expected


def test_dense_sizes_that_do_not_tile() -> None:
    assert message(resolve, parsed(), world=12, tp=4, cp=2) == (
        "tensor_parallel.autotp_size=4 does not tile the ranks: tp 4 x cp 2 x pp 1 = 8 does not divide world size 12. "
        "Values that work with world_size=12, cp=2, pp=1: 1, 2, 3, 6. See: ds-etp topology --world 12 --tp 3 --cp 2 "
        "--etp 3"
    )


def test_dense_sizes_that_no_tp_can_mend() -> None:
    assert message(resolve, parsed(), world=8, pp=3) == (
        "tensor_parallel.autotp_size=1 does not tile the ranks: tp 1 x cp 1 x pp 3 = 3 does not divide world size 8. "
        "Values that work with world_size=8, cp=1, pp=3: none. Change cp, pp or the number of ranks."
    )


def test_etp_that_does_not_tile() -> None:
    assert message(resolve, parsed(etp_size=6, ep_size=4), world=16, tp=2) == (
        "expert_tensor_parallel.etp_size=6 does not tile the ranks: etp 6 x ep 4 x pp 1 = 24 does not divide "
        "world size 16. Values that work with world_size=16, ep_size=4, pp=1: 1, 2, 4. Values of ep_size that work "
        "with etp_size=6: none. See: ds-etp topology --world 16 --tp 2 --etp 4 --ep 4"
    )


def test_etp_and_ep_that_tile_alone_but_not_together() -> None:
    assert message(resolve, parsed(etp_size=4, ep_size=4), world=16, pp=2) == (
        "expert_tensor_parallel.etp_size=4 does not tile the ranks: etp 4 x ep 4 x pp 2 = 32 does not divide "
        "world size 16. Values that work with world_size=16, ep_size=4, pp=2: 1, 2. Values of ep_size that work "
        "with etp_size=4: 1, 2. See: ds-etp topology --world 16 --pp 2 --etp 2 --ep 4"
    )


def test_ep_that_does_not_tile_beside_auto() -> None:
    assert message(resolve, parsed(ep_size=8), world=8, tp=2) == (
        "expert_tensor_parallel.ep_size=8 does not tile the ranks: etp 2 (auto: = tp) x ep 8 x pp 1 = 16 does not "
        "divide world size 8. Values that work with world_size=8, etp_size=2, pp=1: 1, 2, 4. Values of etp_size that "
        "work with ep_size=8: 1. See: ds-etp topology --world 8 --tp 2 --etp 2 --ep 4"
    )


def test_ep_that_no_etp_can_mend() -> None:
    assert message(resolve, parsed(etp_size=2, ep_size=3), world=8) == (
        "expert_tensor_parallel.ep_size=3 does not tile the ranks: etp 2 x ep 3 x pp 1 = 6 does not divide "
        "world size 8. Values that work with world_size=8, etp_size=2, pp=1: 1, 2, 4. Values of etp_size that work "
        "with ep_size=3: none. See: ds-etp topology --world 8 --etp 2 --ep 2"
    )


def test_neither_etp_nor_ep_tiles() -> None:
    assert message(resolve, parsed(etp_size=3, ep_size=5), world=8) == (
        "expert_tensor_parallel.etp_size=3 does not tile the ranks: etp 3 x ep 5 x pp 1 = 15 does not divide "
        "world size 8. Values that work with world_size=8, ep_size=1, pp=1: 1, 2, 4, 8. Values of ep_size that work "
        "with etp_size=1: 1, 2, 4, 8. See: ds-etp topology --world 8 --etp 2"
    )


@pytest.mark.parametrize("name", ["world", "tp", "cp", "pp"])
def test_sizes_start_at_one(name: str) -> None:
    assert message(resolve, parsed(), **{"world": 8, name: 0}) == f"{name}=0 {EP_RULE}"


def test_every_listed_size_works_and_no_other() -> None:
    for world in range(1, 25):
        for etp in range(1, 9):
            for ep in range(1, 9):
                if world % (etp * ep) == 0:
                    resolve(parsed(etp_size=etp, ep_size=ep), world=world)
                    continue
                text = message(resolve, parsed(etp_size=etp, ep_size=ep), world=world)
                listed = re.search(r"with world_size=\d+, (\w+)_size=(\d+), pp=1: ([\d, ]+)\.", text)
                assert listed is not None, text
                other, fixed = listed[1], int(listed[2])
                works = [size for size in range(1, world + 1) if world % (size * fixed) == 0]
                assert listed[3] == ", ".join(map(str, works)), text
                assert other in ("etp", "ep")


# TokenDispatcher


@pytest.mark.parametrize(("tp", "etp", "ep"), [(4, 2, 2), (8, 2, 1), (4, 4, 1), (1, 1, 1)])
def test_replicated_where_tokens_are_shared(tp: int, etp: int, ep: int) -> None:
    check_dispatcher(parsed(dispatcher="replicated"), Topology(world=8, tp=tp, etp=etp, ep=ep))


def test_replicated_where_tokens_differ() -> None:
    assert message(check_dispatcher, parsed(dispatcher="replicated"), Topology(world=8, tp=2, etp=2, ep=2)) == (
        "expert_tensor_parallel.dispatcher='replicated' needs expert ranks to hold the same tokens: tp 2 is not a "
        "multiple of etp 2 x ep 2 = 4. Values that work: auto, allgather, alltoall, alltoall_etp_first."
    )


@pytest.mark.parametrize("dispatcher", ["auto", *DISPATCHERS[1:]])
def test_other_plans_fit_every_topology(dispatcher: str) -> None:
    check_dispatcher(parsed(dispatcher=dispatcher), Topology(world=8, tp=2, etp=4, ep=2))


# Host options

MOVE = (
    "Move expert_parallel.autoep_size to expert_tensor_parallel.ep_size and "
    "expert_parallel.expert_tensor_parallel_size to expert_tensor_parallel.etp_size, and remove the expert_parallel "
    "block: its other keys have no counterpart here."
)
MIXES = "is not supported: it partitions parameters over a group that mixes different expert shards."
UNPROVEN = "is not supported: it has not been shown to give right numbers on expert shards."
OTHER = "is not supported: it replaces the ZeRO optimizer by one that knows no expert groups."
NVME = "is not supported: expert checkpoints read tensors in memory, not those swapped to disk."
ZERO12 = (
    "makes ZeRO 1 and 2 reduce expert gradients over every data-parallel rank, which mixes different shards. "
    "Values that work: true. Remove the key."
)
OWN_FILES = "is not supported: checkpoints of split experts are ds_etp's own files"
REMOVED = "is not supported: it was not tried with split experts, and DeepSpeed 0.19.8 has removed it."
NONE = "Values that work: none. Remove the key."
REMOVE = "Values that work: false. Remove the key."
HOST_CASES: list[tuple[str, object, object, str]] = [  # key, refused value, accepted value, rest of the message
    (
        "expert_parallel.enabled",
        True,
        False,
        "cannot be combined with expert_tensor_parallel: both would shard the same experts. "
        f"Values that work: false. {MOVE}",
    ),
    (
        "use_data_before_expert_parallelism",
        True,
        False,
        f"is not supported: expert ranks are laid out etp, ep, edp from the fastest, so ep comes before data. {REMOVE}",
    ),
    ("zero_optimization.zero_hpz_partition_size", 8, 1, f"{MIXES} Values that work: 1. Remove the key."),
    ("zero_optimization.mics_shard_size", 4, -1, f"{MIXES} Values that work: -1. Remove the key."),
    ("zero_optimization.zero_quantized_gradients", True, False, f"{UNPROVEN} {REMOVE}"),
    ("zero_optimization.zero_quantized_weights", True, False, f"{UNPROVEN} {REMOVE}"),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, False, f"{UNPROVEN} {REMOVE}"),
    (
        "zero_optimization.offload_optimizer.device",
        "nvme",
        "cpu",
        f'{NVME} Values that work: cpu, none. Set zero_optimization.offload_optimizer.device to "cpu".',
    ),
    (
        "zero_optimization.offload_param.device",
        "nvme",
        "cpu",
        f'{NVME} Values that work: cpu, none. Set zero_optimization.offload_param.device to "cpu".',
    ),
    ("zero_optimization.offload_optimizer.super_offload", True, False, f"{OTHER} {REMOVE}"),
    ("zero_optimization.save_muon_momentum_buffer_in_memory", True, False, f"{UNPROVEN} {REMOVE}"),
    ("zero_optimization.zenflow", {}, None, f"{OTHER} Values that work: null. Remove the key."),
    ("zero_optimization.contiguous_gradients", False, True, ZERO12),
    ("zero_optimization.reduce_scatter", False, True, ZERO12),
    ("compile.deepcompile", True, False, f"{UNPROVEN} {REMOVE}"),
    (
        "zero_optimization.round_robin_gradients",
        True,
        False,
        "makes DeepSpeed (0.19.8) read a parameter's master weight from another one's place, so checkpoints and "
        f"exports would hold wrong weights. {REMOVE}",
    ),
    ("fp16.enabled", None, None, ""),  # what else they depend on: tests of their own, below
    ("torch_autocast.dtype", None, None, ""),
    ("torch_autocast.dtype", None, None, ""),
    ("optimizer.type", None, None, ""),
    ("optimizer.legacy_fusion", None, None, ""),
    (
        "checkpoint.load_universal",
        True,
        False,
        f"{OWN_FILES}, which load into any layout as they are. {REMOVE}",
    ),
    (
        "checkpoint.use_node_local_storage",
        True,
        False,
        f"{OWN_FILES}, and a rank reads those of all others. {REMOVE}",
    ),
    ("datastates_ckpt", {}, None, f"{OWN_FILES}. {NONE}"),
    ("weight_quantization", {}, None, f"{UNPROVEN} {NONE}"),
    (
        "autotuning.enabled",
        True,
        False,
        f"is not supported: the autotuner's jobs have other configs; use ds-etp plan. {REMOVE}",
    ),
    ("data_efficiency.data_routing.random_ltd.enabled", True, False, f"{UNPROVEN} {REMOVE}"),
    ("data_efficiency.data_sampling.curriculum_learning.enabled", True, False, f"{UNPROVEN} {REMOVE}"),
    ("data_efficiency.data_sampling.dynamic_batching.enabled", True, False, f"{UNPROVEN} {REMOVE}"),
    ("hybrid_engine.inference_tp_size", None, None, ""),
    ("tensor_parallel.keep_module_on_host", True, False, f"{UNPROVEN} {REMOVE}"),
    (
        "tensor_parallel.vocab_parallel_ce_backend",
        "liger",
        "torch",
        f"{UNPROVEN} Values that work: torch. Remove the key.",
    ),
    *((key, {"enabled": True}, {"enabled": False}, f"{REMOVED} {NONE}") for key in REMOVED_BLOCKS),
    *((f"zero_optimization.{key}", True, False, f"{REMOVED} {NONE}") for key in REMOVED_ZERO_KEYS),
]


def nested(key: str, value: object, stage: int = 2) -> dict[str, Any]:
    """A config that holds one dotted key, and ZeRO at `stage`."""
    config: dict[str, Any] = {"expert_tensor_parallel": {}, "zero_optimization": {"stage": stage}}
    *parents, last = key.split(".")
    inner = config
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return config


def test_every_host_rule_has_a_case() -> None:
    assert [rule.key for rule in HOST_RULES] == [case[0] for case in HOST_CASES]


def test_every_host_key_is_deepspeeds_own() -> None:
    found = find_spec("deepspeed")  # finds the package without importing it, and with it torch
    assert found is not None and found.submodule_search_locations
    root = Path(found.submodule_search_locations[0])
    files = (
        "runtime/config.py",
        "runtime/constants.py",
        "runtime/zero/config.py",
        "runtime/zero/offload_config.py",
        "compile/config.py",
        "module_inject/auto_ep_config.py",
        "runtime/tensor_parallel/config.py",
        "runtime/data_pipeline/constants.py",
        "runtime/torch_autocast.py",
        "runtime/precision_config.py",
        "autotuning/constants.py",
        "datastates/config.py",
    )
    source = "".join((root / file).read_text(encoding="utf-8") for file in files)
    words = set(re.findall(r"\w+", source))
    for rule in HOST_RULES:
        assert set(rule.key.split(".")) <= words, rule.key
    assert {"autoep_size", "expert_tensor_parallel_size"} <= words  # the keys the advice says to move


OF_THE_VALUE = [case for case in HOST_CASES if case[3]]


@pytest.mark.parametrize(("key", "refused", "accepted", "rest"), OF_THE_VALUE, ids=[case[0] for case in OF_THE_VALUE])
def test_host_option(key: str, refused: object, accepted: object, rest: str) -> None:
    assert message(check_host_options, nested(key, refused), 16) == (
        f"{key}={refused!r} {rest} See: ds-etp check CONFIG.json --gpus 16"
    )
    check_host_options(nested(key, accepted), 16)
    if key.startswith(("zero_optimization.", "compile.")):  # DeepSpeed's models drop "auto", which HF configs hold
        check_host_options(nested(key, "auto"), 16)


@pytest.mark.parametrize("key", ["contiguous_gradients", "reduce_scatter"])
@pytest.mark.parametrize(("stage", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_gradient_buffers_matter_at_stages_1_and_2(key: str, stage: int, refused: bool) -> None:
    config = nested(f"zero_optimization.{key}", False, stage)
    if refused:
        assert message(check_host_options, config, 8).startswith(f"zero_optimization.{key}=False makes ZeRO 1 and 2")
    else:
        check_host_options(config, 8)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled=True does not train at ZeRO stage 0"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "Set zero_optimization.stage to 1"),
        ({"fp16": {"enabled": True, "loss_scale": 1}}, None),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, None),
        ({"fp16": {"enabled": "auto"}}, None),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype='float16' does not keep"),
        ({"torch_autocast": {"enabled": False, "dtype": "float16"}}, None),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, None),
        (
            {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}, "zero_optimization": {"stage": 2}},
            "torch_autocast.dtype='torch.float16' does not train at ZeRO stages 1 to 3",
        ),
        ({"optimizer": {"type": "AdamW"}}, None),
        ({"optimizer": {"type": "auto"}}, None),
        ({"optimizer": {"type": "Adagrad"}}, None),
        ({"optimizer": {"type": "Adagrad"}, "zero_optimization": {"stage": 3}}, "does not work at ZeRO stages 1 to 3"),
        ({"optimizer": {"type": "Muon"}, "expert_tensor_parallel": {"etp_size": 1, "ep_size": 2}}, None),
        ({"optimizer": {"type": "Adam", "legacy_fusion": True}}, "optimizer.legacy_fusion=True is not supported at"),
        ({"optimizer": {"type": "Adam", "legacy_fusion": True}, "zero_optimization": {"stage": 1}}, None),
        ({"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}, "hybrid_engine.inference_tp_size=2 is not"),
        ({"hybrid_engine": {"enabled": False, "inference_tp_size": 2}}, None),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training="),
        ({"sparse_gradients": True}, "sparse_gradients=True is not supported"),
        ({"elasticity": {}}, None),
    ],
    ids=str,
)
def test_host_options_that_depend_on_others(config: dict[str, Any], says: str | None) -> None:
    config = {"expert_tensor_parallel": {}, **config}
    if says is None:
        check_host_options(config, 8)
    else:
        assert says in message(check_host_options, config, 8)


@pytest.mark.parametrize("value", [1, "true", "True"])
def test_booleans_as_deepspeed_reads_them(value: object) -> None:
    assert "zero_quantized_weights" in message(
        check_host_options, nested("zero_optimization.zero_quantized_weights", value), 8
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": True},
        {"zero_optimization": {"stage": "auto", "offload_optimizer": None, "overlap_comm": "auto"}},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "none"},
            }
        },
        {"expert_parallel": {"autoep_size": 4}},
        {"compile": {"passes": ["z3"]}, "bf16": {"enabled": True}},
    ],
)
def test_usual_configs_pass(config: dict[str, object]) -> None:
    check_host_options(config, 8)


@pytest.mark.parametrize(("given", "expected"), [(4, 4), ("4", 4), (0, 1), ("auto", 1), (None, 1)])
def test_autotp_size(given: object, expected: int) -> None:
    assert autotp_size({"tensor_parallel": {"autotp_size": given}}) == expected


def test_autotp_size_without_the_block() -> None:
    assert autotp_size({}) == 1


# Layers

LAYER = "model.layers.3.mlp.experts"


def test_a_layer_that_fits() -> None:
    check_layer(Topology(world=16, etp=4, ep=4), LAYER, num_experts=64, intermediate_size=1408)


def test_intermediate_size_not_divisible() -> None:
    topology = Topology(world=24, tp=2, etp=6, ep=4)
    assert message(check_layer, topology, LAYER, num_experts=64, intermediate_size=1408) == (
        "expert_tensor_parallel.etp_size=6 cannot shard model.layers.3.mlp.experts: intermediate size 1408 is not "
        "divisible by 6. Sizes that work with world_size=24, ep_size=4: 1, 2. "
        "See: ds-etp topology --world 24 --tp 2 --etp 2 --ep 4"
    )


def test_experts_not_divisible() -> None:
    topology = Topology(world=16, pp=2, etp=1, ep=8)
    assert message(check_layer, topology, LAYER, num_experts=60, intermediate_size=1408) == (
        "expert_tensor_parallel.ep_size=8 cannot shard model.layers.3.mlp.experts: number of experts 60 is not "
        "divisible by 8. Sizes that work with world_size=16, etp_size=1, pp=2: 1, 2, 4. "
        "See: ds-etp topology --world 16 --pp 2 --etp 1 --ep 4"
    )


def test_more_expert_ranks_than_experts() -> None:
    text = message(check_layer, Topology(world=8, ep=8), LAYER, num_experts=4, intermediate_size=64)
    assert "number of experts 4 is not divisible by 8. Sizes that work with world_size=8, etp_size=1: 1, 2, 4." in text


# Layout


def test_layout_table() -> None:
    block = parsed(ep_size=2)
    assert layout_table(resolve(block, world=16, tp=4), block) == [
        ("world", "16"),
        ("tp", "4"),
        ("cp", "1"),
        ("pp", "1"),
        ("dp", "4"),
        ("etp", "4 (auto: = tp)"),
        ("ep", "2"),
        ("edp", "2"),
        ("dispatcher", "auto"),
    ]


def test_layout_table_with_a_size_of_its_own() -> None:
    block = parsed(etp_size=2, dispatcher="replicated")
    table = dict(layout_table(resolve(block, world=8, tp=4), block))
    assert (table["etp"], table["edp"], table["dispatcher"]) == ("2", "4", "replicated")
