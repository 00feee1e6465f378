"""Which parallel sizes of the dense path go together: rules that the engine, `ds-etp check` and the planner share.

From sizes alone, no torch. Experts' own sizes are checked in `config`.
"""

from __future__ import annotations

from ds_etp.config.deepspeed import AUTOTP
from ds_etp.errors import config_error
from ds_etp.parallel.topology import Topology

# What pipelines work with. DeepSpeed's pipeline engine takes no other ZeRO stages.
PIPELINE_ZERO: tuple[int, ...] = (0, 1)
PIPELINE_DTYPES = (None, "bfloat16")

# What DeepSpeed's Ulysses (0.19.8) can't share between ranks.
HEAD_SIZES = "Ulysses takes queries, keys and values of one size a head"
HEAD_SINKS = "Ulysses does not split the number that its attention learns for each head"

CP = "sequence parallel size"
PP = "pipeline parallel size"


def check_axes(topology: Topology, stage: int, half_dtype: str | None = None) -> None:
    """Refuses pipelines with what they don't work with.

    Args:
        topology: sizes of both paths.
        stage: the ZeRO stage.
        half_dtype: as `host_options.half_dtype` reads it.

    Raises:
        ConfigError: names the key to change.
    """
    if topology.pp == 1:
        return
    where = f"{PP} {topology.pp}"
    check_pipeline(stage, half_dtype, where)
    if topology.cp > 1:
        raise config_error(CP, topology.cp, f"does not work with {where}", works="1")


def check_pipeline(stage: int, half_dtype: str | None, where: str) -> None:
    """Refuses what no pipeline works with, also one of a single stage.

    Args:
        stage: the ZeRO stage.
        half_dtype: as `host_options.half_dtype` reads it.
        where: what a message calls the pipeline.

    Raises:
        ConfigError: names the key to change.
    """
    if stage not in PIPELINE_ZERO:
        rule = f"does not work with {where}: a pipeline keeps whole gradients until its last micro batch"
        raise config_error("zero_optimization.stage", stage, rule, works=PIPELINE_ZERO)
    if half_dtype not in PIPELINE_DTYPES:
        raise config_error("fp16.enabled", True, f"was not tried with {where}", works="bf16, or neither")


def check_sequence_heads(topology: Topology, heads: int, key_value_heads: int) -> None:
    """Refuses head counts that ranks which share a sequence (Ulysses), and those of AutoTP, can't divide.

    Args:
        topology: sizes of both paths.
        heads, key_value_heads: of the whole model's attention.

    Raises:
        ConfigError: tp x cp does not divide the heads, tp the key and value heads, or of those that tp leaves and cp
            neither divides the other.
    """
    tp, cp = topology.tp, topology.cp
    if cp == 1:
        return
    if tp == 1:
        if heads % cp or not _share(key_value_heads, cp):
            raise config_error(
                CP,
                cp,
                f"does not split attention: the model's {heads} attention heads are not divisible by {cp}"
                if heads % cp
                else f"does not split attention: neither it nor the {key_value_heads} key and value heads divide the "
                "other",
                works=(size for size in range(1, heads + 1) if heads % size == 0 and _share(key_value_heads, size)),
            )
        return
    for what, count, size, works in (
        ("attention heads", heads, tp * cp, "of which tp x sequence parallel size is a divisor"),
        ("key and value heads", key_value_heads, tp, "of which tp is a divisor"),
    ):
        if count % size:
            rule = f"with {CP} {cp}: the model's {count} {what} are not divisible by {size}"
            raise config_error(AUTOTP, tp, rule, works=f"sizes {works}")
    left = key_value_heads // tp
    if not _share(left, cp):
        rule = f"with {CP} {cp}: neither it nor the {left} key and value heads that tp leaves a rank divide the other"
        raise config_error(AUTOTP, tp, rule, works="sizes of which one divides the other")


def check_stages(topology: Topology, layers: int) -> None:
    """Refuses more pipeline stages than the model has layers.

    Raises:
        ConfigError: names the most that work.
    """
    if topology.pp > max(layers, 1):
        raise config_error(PP, topology.pp, f"is more than the model's {layers} layers", works=f"1 to {layers}")


def _share(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0
