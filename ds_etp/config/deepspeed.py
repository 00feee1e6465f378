"""DeepSpeed's own options: which of them don't work with split experts, and the size of attention's TP.

The raw config is read as DeepSpeed reads it, before DeepSpeed does. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from ds_etp.errors import config_error

BLOCK = "expert_tensor_parallel"
AUTOTP = "tensor_parallel.autotp_size"

T = TypeVar("T", bool, int)


def autotp_size(ds_config: Mapping[str, object]) -> int:
    """tp as DeepSpeed's AutoTP will read it from the raw config; 0, "auto" and absent mean off, which is tp 1."""
    return max(_lax(int, _lookup(ds_config, AUTOTP)) or 1, 1)


def zero_stage(ds_config: Mapping[str, object]) -> int:
    """The ZeRO stage."""
    return _lax(int, _lookup(ds_config, f"{_ZERO}.stage")) or 0


def half_dtype(ds_config: Mapping[str, object]) -> str | None:
    """`bfloat16` or `float16`, which the engine casts the model to; None: it stays as it is."""
    for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if _on(_lookup(ds_config, f"{key}.enabled")):
            return dtype
    return None


@dataclass(frozen=True)
class HostRule:
    """A DeepSpeed option that does not work with split experts: its key, when it is refused, why, and what to do."""

    key: str
    refused: Callable[[object], bool]
    rule: str
    works: str = "false"
    do: str = "Remove the key."
    stages: tuple[int, ...] = (0, 1, 2, 3)


def _on(value: object) -> bool:
    return _lax(bool, value) is True


_ZERO = "zero_optimization"
_MIXES = "is not supported: it partitions parameters over a group that mixes different expert shards"
_UNPROVEN = "is not supported: it has not been shown to give right numbers on expert shards"
_OTHER = "is not supported: it replaces the ZeRO optimizer by one that knows no expert groups"
_ZERO12 = "makes ZeRO 1 and 2 reduce expert gradients over every data-parallel rank, which mixes different shards"

# Keys as deepspeed 0.19.8 spells them in runtime/config.py, runtime/constants.py, runtime/zero/config.py,
# runtime/zero/offload_config.py and compile/config.py. `bool` is for keys whose raw value's truth DeepSpeed takes.
HOST_RULES = (
    HostRule(
        "expert_parallel.enabled",
        bool,
        f"cannot be combined with {BLOCK}: both would shard the same experts",
        do=f"Move expert_parallel.autoep_size to {BLOCK}.ep_size and expert_parallel.expert_tensor_parallel_size to "
        f"{BLOCK}.etp_size, and remove the expert_parallel block: its other keys have no counterpart here.",
    ),
    HostRule(
        "use_data_before_expert_parallelism",
        bool,
        "is not supported: expert ranks are laid out etp, ep, edp from the fastest, so ep comes before data",
    ),
    HostRule(f"{_ZERO}.zero_hpz_partition_size", lambda value: (_lax(int, value) or 1) > 1, _MIXES, works="1"),
    # Gone in deepspeed 0.19.8, which refuses the key itself; still in 0.19.5.
    HostRule(f"{_ZERO}.mics_shard_size", lambda value: (_lax(int, value) or -1) > 0, _MIXES, works="-1"),
    *(
        HostRule(f"{_ZERO}.{key}", _on, _UNPROVEN)
        for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    *(
        HostRule(
            f"{_ZERO}.{key}.device",
            lambda value: value == "nvme",
            "is not supported: expert checkpoints read tensors in memory, not those swapped to disk",
            works="cpu, none",
            do=f'Set {_ZERO}.{key}.device to "cpu".',
        )
        for key in ("offload_optimizer", "offload_param")
    ),
    HostRule(f"{_ZERO}.offload_optimizer.super_offload", _on, _OTHER),
    HostRule(f"{_ZERO}.zenflow", lambda value: value not in (None, "auto"), _OTHER, works="null"),
    # DeepSpeed asserts on reduce_scatter (stages 1, 2) and on contiguous_gradients at stage 2. At stage 1 it only
    # warns, and then reduces experts over the dense data-parallel group.
    *(
        HostRule(f"{_ZERO}.{key}", lambda value: _lax(bool, value) is False, _ZERO12, works="true", stages=(1, 2))
        for key in ("contiguous_gradients", "reduce_scatter")
    ),
    HostRule("compile.deepcompile", _on, _UNPROVEN),
)


def check_host_options(ds_config: Mapping[str, object], world: int) -> None:
    """Refuses the DeepSpeed options that do not work with split experts (`HOST_RULES`), the first one found.

    Args:
        ds_config: the raw DeepSpeed config.
        world: number of ranks, for the command that the message ends with.
    """
    stage = zero_stage(ds_config)
    for rule in HOST_RULES:
        value = _lookup(ds_config, rule.key)
        if stage in rule.stages and rule.refused(value):
            see = f"See: ds-etp check CONFIG.json --gpus {world}"
            raise config_error(rule.key, value, rule.rule, works=rule.works, next_step=f"{rule.do} {see}")


def _lookup(ds_config: Mapping[str, object], key: str) -> object:
    """The value at a dotted key, or None; a parent that is no object (`zero_optimization: true`) holds nothing."""
    value: object = ds_config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _lax(kind: type[T], value: object) -> T | None:
    """A value as DeepSpeed's own models read it: "true" and 1 are True; what does not parse ("auto") is not set."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None
