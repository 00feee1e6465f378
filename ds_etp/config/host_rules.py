"""DeepSpeed's own options that don't work with split experts, and what to do about them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds_etp.config.deepspeed import BLOCK, is_on, lax, lookup, zero_stage
from ds_etp.errors import config_error


@dataclass(frozen=True)
class HostRule:
    """A DeepSpeed option that does not work with split experts: its key, when it is refused, why, and what to do.

    Attributes:
        key: dotted; the rule answers for the keys below it too.
        refused: whether this value of it is.
        stages: the ZeRO stages at which it is.
        where: what else of the config has to hold.
    """

    key: str
    refused: Callable[[object], bool]
    rule: str
    works: str = "false"
    do: str = "Remove the key."
    stages: tuple[int, ...] = (0, 1, 2, 3)
    where: Callable[[Mapping[str, object]], bool] | None = None

    @property
    def always(self) -> bool:
        """Whether the key's value alone decides."""
        return self.stages == (0, 1, 2, 3) and self.where is None

    def refuses(self, ds_config: Mapping[str, object]) -> bool:
        """Whether a raw config has the option on where it doesn't work."""
        if zero_stage(ds_config) not in self.stages or not self.refused(lookup(ds_config, self.key)):
            return False
        return self.where is None or self.where(ds_config)


def _block_on(value: object) -> bool:
    """A block that its own `enabled` turns on, or its presence; or a flag."""
    if isinstance(value, Mapping):
        return is_on(value.get("enabled", bool(value)))
    return is_on(value)


def _with(key: str) -> Callable[[Mapping[str, object]], bool]:
    """Where another option is on too."""
    return lambda ds_config: is_on(lookup(ds_config, key))


def _scales_losses(ds_config: Mapping[str, object]) -> bool:
    return lax(float, lookup(ds_config, "fp16.loss_scale")) != 1


def _is_float16(value: object) -> bool:
    return isinstance(value, str) and value.rpartition(".")[2] in ("float16", "fp16", "half")


def _is_optimizer(*names: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value.lower() in names


_ZERO = "zero_optimization"
_MIXES = "is not supported: it partitions parameters over a group that mixes different expert shards"
_UNPROVEN = "is not supported: it has not been shown to give right numbers on expert shards"
_OTHER = "is not supported: it replaces the ZeRO optimizer by one that knows no expert groups"
_REMOVED = "is not supported: it was not tried with split experts, and DeepSpeed 0.19.8 has removed it"
_OWN_FILES = "is not supported: checkpoints of split experts are ds_etp's own files"
_ZERO12 = "makes ZeRO 1 and 2 reduce expert gradients over every data-parallel rank, which mixes different shards"

REMOVED_BLOCKS = (
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
    *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
)
REMOVED_ZERO_KEYS = ("mics_hierarchical_params_gather", "zeropp_loco_param")

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
    HostRule(f"{_ZERO}.zero_hpz_partition_size", lambda value: (lax(int, value) or 1) > 1, _MIXES, works="1"),
    # Gone in deepspeed 0.19.8, which refuses the key itself; still in 0.19.5.
    HostRule(f"{_ZERO}.mics_shard_size", lambda value: (lax(int, value) or -1) > 0, _MIXES, works="-1"),
    *(
        HostRule(f"{_ZERO}.{key}", is_on, _UNPROVEN)
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
    HostRule(f"{_ZERO}.offload_optimizer.super_offload", is_on, _OTHER),
    HostRule(f"{_ZERO}.save_muon_momentum_buffer_in_memory", is_on, _UNPROVEN),
    HostRule(f"{_ZERO}.zenflow", lambda value: value not in (None, "auto"), _OTHER, works="null"),
    # DeepSpeed asserts on reduce_scatter (stages 1, 2) and on contiguous_gradients at stage 2. At stage 1 it only
    # warns, and then reduces experts over the dense data-parallel group.
    *(
        HostRule(f"{_ZERO}.{key}", lambda value: lax(bool, value) is False, _ZERO12, works="true", stages=(1, 2))
        for key in ("contiguous_gradients", "reduce_scatter")
    ),
    HostRule("compile.deepcompile", is_on, _UNPROVEN),
    HostRule(
        f"{_ZERO}.round_robin_gradients",
        is_on,
        "makes DeepSpeed (0.19.8) read a parameter's master weight from another one's place, so checkpoints and "
        "exports would hold wrong weights",
        stages=(1, 2),
    ),
    HostRule(
        "fp16.enabled",
        is_on,
        "does not train at ZeRO stage 0: DeepSpeed (0.19.8) divides gradients by the loss scale there, and never "
        "multiplies the loss by it",
        works=f"{_ZERO}.stage 1, 2 or 3; or fp16.loss_scale 1, which may lose small gradients; or bf16",
        do=f"Set {_ZERO}.stage to 1, which takes less memory too.",
        stages=(0,),
        where=_scales_losses,
    ),
    HostRule(
        "torch_autocast.dtype",
        _is_float16,
        "does not keep ranks in step at ZeRO stage 0: each looks for overflow in its own experts' gradients only, and "
        "skips steps that others take",
        works="bfloat16",
        do='Set torch_autocast.dtype to "bfloat16".',
        stages=(0,),
        where=_with("torch_autocast.enabled"),
    ),
    HostRule(
        "torch_autocast.dtype",
        _is_float16,
        "does not train at ZeRO stages 1 to 3: DeepSpeed (0.19.8) clips gradients by their norm before it divides them "
        "by the loss scale",
        works="bfloat16",
        do='Set torch_autocast.dtype to "bfloat16".',
        stages=(1, 2, 3),
        where=_with("torch_autocast.enabled"),
    ),
    HostRule(
        "optimizer.type",
        _is_optimizer("adagrad"),
        "does not work at ZeRO stages 1 to 3: DeepSpeed (0.19.8) makes the optimizer anew there and loses the groups "
        "of its parameters, of which experts have one",
        works=f"with {_ZERO}.stage 0; or another optimizer",
        do=f"Set {_ZERO}.stage to 0.",
        stages=(1, 2, 3),
    ),
    HostRule(
        "optimizer.legacy_fusion",
        is_on,
        "is not supported at ZeRO stage 0: the gradient norm would be that of a rank's own experts",
        stages=(0,),
    ),
    HostRule("checkpoint.load_universal", is_on, f"{_OWN_FILES}, which load into any layout as they are"),
    HostRule("checkpoint.use_node_local_storage", is_on, f"{_OWN_FILES}, and a rank reads those of all others"),
    HostRule("datastates_ckpt", lambda value: value not in (None, False), _OWN_FILES, works="none"),
    HostRule("weight_quantization", lambda value: value is not None, _UNPROVEN, works="none"),
    HostRule("autotuning.enabled", is_on, "is not supported: the autotuner's jobs have other configs; use ds-etp plan"),
    *(
        HostRule(f"data_efficiency.{key}.enabled", is_on, _UNPROVEN)
        for key in ("data_routing.random_ltd", "data_sampling.curriculum_learning", "data_sampling.dynamic_batching")
    ),
    HostRule(
        "hybrid_engine.inference_tp_size",
        lambda value: (lax(int, value) or 1) > 1,
        _UNPROVEN,
        works="1",
        where=_with("hybrid_engine.enabled"),
    ),
    HostRule("tensor_parallel.keep_module_on_host", is_on, _UNPROVEN),
    HostRule("tensor_parallel.vocab_parallel_ce_backend", lambda value: value == "liger", _UNPROVEN, works="torch"),
    # DeepSpeed 0.19.8 itself refuses these.
    *(HostRule(key, _block_on, _REMOVED, works="none") for key in REMOVED_BLOCKS),
    *(HostRule(f"{_ZERO}.{key}", _block_on, _REMOVED, works="none") for key in REMOVED_ZERO_KEYS),
)


def check_host_options(ds_config: Mapping[str, object], world: int) -> None:
    """Refuses the DeepSpeed options that do not work with split experts (`HOST_RULES`), the first one found.

    Args:
        ds_config: the raw DeepSpeed config.
        world: number of ranks, for the command that the message ends with.
    """
    for rule in HOST_RULES:
        if rule.refuses(ds_config):
            see = f"See: ds-etp check CONFIG.json --gpus {world}"
            value = lookup(ds_config, rule.key)
            raise config_error(rule.key, value, rule.rule, works=rule.works, next_step=f"{rule.do} {see}")
