"""The `expert_tensor_parallel` block: parsed, then checked against the world, then against each layer.

Every check is arithmetic on the raw config and raises `ConfigError` before any process group is made,
so that all ranks fail alike and with the same message. No torch here: the CLI runs these checks anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from ds_etp import aliases
from ds_etp.config.deepspeed import AUTOTP, BLOCK
from ds_etp.config.monitor import check_monitor
from ds_etp.dispatch.cost import DISPATCHER_NAMES, INTER_NODE_COST, tokens_are_replicated
from ds_etp.errors import ConfigError, config_error
from ds_etp.parallel.topology import Topology

DISPATCHERS = DISPATCHER_NAMES

Size = Annotated[StrictInt, Field(ge=1)]


class ExpertTensorParallelConfig(BaseModel):
    """The block as the user wrote it, defaults filled in. Built by `parse_block`, which words its errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = True  # writing the block means wanting it: a silent no-op would be worse
    etp_size: Literal["auto"] | Size = "auto"
    ep_size: Size = 1
    dispatcher: Literal["auto", "replicated", "allgather", "alltoall", "alltoall_etp_first"] = "auto"
    reduce_dtype: Literal["auto", "fp32"] = "auto"
    recompute: StrictBool = False
    overlap: StrictBool = False
    replicate_lm_head: Literal["auto"] | StrictBool = "auto"
    replica_check_interval: Annotated[StrictInt, Field(ge=0)] = 100
    allow_optimizer: StrictBool = False
    monitor_router: Literal["layers"] | StrictBool = False
    monitor_interval: Literal["auto"] | Size = "auto"
    async_save: StrictBool = False
    inter_node_cost: Annotated[float, Field(ge=1, strict=True, allow_inf_nan=False)] = INTER_NODE_COST


_RULES: dict[str, tuple[str, str]] = {  # key -> (rule, values that work)
    "enabled": ("is not a boolean", "true, false"),
    "etp_size": ("is not a size: a whole number of at least 1 is needed", '"auto" (= tp), 1, 2, 3, ...'),
    "ep_size": ("is not a size: a whole number of at least 1 is needed", "1, 2, 3, ..."),
    "dispatcher": ("is not a dispatcher", ", ".join(("auto", *DISPATCHERS))),
    "reduce_dtype": ("is not a dtype that partial sums can be reduced in", "auto, fp32"),
    "recompute": ("is not a boolean", "true, false"),
    "overlap": ("is not a boolean", "true, false"),
    "replicate_lm_head": ('is neither a boolean nor "auto"', '"auto", true, false'),
    "replica_check_interval": ("is not a number of steps: a whole number is needed", "0 (never), 1, 100, ..."),
    "allow_optimizer": ("is not a boolean", "true, false"),
    "monitor_router": (
        'is neither a boolean nor "layers"',
        'false, true, "layers" (without the tokens of each expert)',
    ),
    "monitor_interval": ("is not a number of steps of at least 1", '"auto" (= steps_per_print), 1, 10, ...'),
    "async_save": ("is not a boolean", "true, false"),
    "inter_node_cost": (
        "is not a cost of links between nodes, relative to those inside: at least 1 is needed",
        "1, 8, 12.5",
    ),
}
_OTHER_NAMES = {  # what the same size is called elsewhere, too far from our name for difflib
    "expert_tensor_parallel_size": "etp_size",
    "expert_parallel_size": "ep_size",
    "autoep_size": "ep_size",
}


def check_block_name(ds_config: Mapping[str, object]) -> None:
    """Refuses a top-level key that is almost `expert_tensor_parallel`: DeepSpeed would ignore it in silence."""
    for key in map(str, ds_config):
        name = key.lower().replace("-", "_")
        # 0.85 passes DeepSpeed's own "expert_parallel" and "tensor_parallel" (0.81).
        if key != BLOCK and SequenceMatcher(None, name, BLOCK).ratio() > 0.85:
            rule = f"is not a key of DeepSpeed or ds_etp: did you mean {BLOCK!r}?"
            raise config_error(key, ds_config.get(key), rule, label="Keys that work", works=BLOCK)


def parse_block(ds_config: Mapping[str, object]) -> ExpertTensorParallelConfig | None:
    """Reads the block from a raw DeepSpeed config.

    Returns:
        The block, or None when it is absent or not enabled.

    Raises:
        ConfigError: the block or its name is misspelt, is no object, or holds an unknown key or a wrong value; or it
            asks for numbers in a monitor, and none is enabled.
    """
    check_block_name(ds_config)
    if BLOCK not in ds_config:
        return None
    raw = ds_config[BLOCK]
    if not isinstance(raw, Mapping):
        raise config_error(BLOCK, raw, "is not an object", works='{}, {"etp_size": 2}, {"enabled": false}')
    try:
        block = ExpertTensorParallelConfig.model_validate(_with_new_names(raw))
    except ValidationError as error:
        first = error.errors()[0]
        raise _block_error(str(first["loc"][0]), first["input"]) from None
    if not block.enabled:
        return None
    check_monitor(block.monitor_router, ds_config)
    return block


def _with_new_names(raw: Mapping[str, object]) -> dict[str, object]:
    """The block's entries under today's names. Old ones work, with a warning; keys without effect are
    left out, with one too.

    Raises:
        ConfigError: a key is there under both of its names.
    """
    values: dict[str, object] = {}
    for key, value in raw.items():
        if key in aliases.REMOVED_CONFIG_KEYS:
            aliases.warn_removed(f"{BLOCK}.{key}", aliases.REMOVED_CONFIG_KEYS[key])
            continue
        name = aliases.CONFIG_KEYS.get(key, key)
        if name != key:
            if name in raw:
                raise config_error(
                    f"{BLOCK}.{key}", value, f"is the old name of {name!r}, which is there too", works=name
                )
            aliases.warn_renamed(f"{BLOCK}.{key}", f"{BLOCK}.{name}")
        if name == "dispatcher" and isinstance(value, str) and value in aliases.DISPATCHER_NAMES:
            aliases.warn_renamed(f"{BLOCK}.{name}={value!r}", repr(aliases.DISPATCHER_NAMES[value]))
            value = aliases.DISPATCHER_NAMES[value]
        values[name] = value
    return values


def _block_error(key: str, value: object) -> ConfigError:
    if key in _RULES:
        rule, works = _RULES[key]
        return config_error(f"{BLOCK}.{key}", value, rule, works=works)
    close = [_OTHER_NAMES[key]] if key in _OTHER_NAMES else get_close_matches(key.lower(), _RULES, n=1)
    rule = "is not a key of this block" + (f": did you mean {close[0]!r}?" if close else "")
    return config_error(f"{BLOCK}.{key}", value, rule, label="Keys that work", works=_RULES)


def resolve(block: ExpertTensorParallelConfig, *, world: int, tp: int = 1, cp: int = 1, pp: int = 1) -> Topology:
    """Lays the block's sizes over the world; `"auto"` takes etp = tp.

    Raises:
        ConfigError: a path's sizes do not tile the world; it names the sizes that would.
    """
    for name, size in (("world", world), ("tp", tp), ("cp", cp), ("pp", pp)):
        if size < 1:
            raise config_error(name, size, _RULES["ep_size"][0], works=_RULES["ep_size"][1])
    etp, ep = (tp if block.etp_size == "auto" else block.etp_size), block.ep_size
    if world % (tp * cp * pp):
        works = _tiling(world, cp * pp)
        fit = _nearest(works, tp)
        raise config_error(
            AUTOTP,
            tp,
            f"does not tile the ranks: tp {tp} x cp {cp} x pp {pp} = {tp * cp * pp} does not divide world size {world}",
            label=f"Values that work with world_size={world}, cp={cp}, pp={pp}",
            works=works,
            next_step=_see(Topology(world, fit, cp, pp, etp=fit)) if works else "Change cp, pp or the number of ranks.",
        )
    if world % (etp * ep * pp):
        raise _expert_tiling_error(block, Topology(world, tp=tp, cp=cp, pp=pp), etp, ep)
    return Topology(world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


def _expert_tiling_error(block: ExpertTensorParallelConfig, dense: Topology, etp: int, ep: int) -> ConfigError:
    world, pp, auto = dense.world, dense.pp, block.etp_size == "auto"
    sizes = {"etp": etp, "ep": ep}
    # Where neither fits alone, list what each can be beside a 1.
    fixed = {"etp": 1, "ep": 1} if world % (etp * pp) and world % (ep * pp) else sizes
    works = {"etp": _tiling(world, fixed["ep"] * pp), "ep": _tiling(world, fixed["etp"] * pp)}
    # Blame the key the user wrote and, where both are written, the one whose change alone would help.
    blamed, other = ("ep", "etp") if auto or not works["etp"] else ("etp", "ep")
    product = f"etp {etp}{' (auto: = tp)' if auto else ''} x ep {ep} x pp {pp} = {etp * ep * pp}"
    others = ", ".join(map(str, works[other])) or "none"
    fitting = fixed | {blamed: _nearest(works[blamed], sizes[blamed])}
    return config_error(
        f"{BLOCK}.{blamed}_size",
        sizes[blamed],
        f"does not tile the ranks: {product} does not divide world size {world}",
        label=f"Values that work with world_size={world}, {other}_size={fixed[other]}, pp={pp}",
        works=works[blamed],
        next_step=f"Values of {other}_size that work with {blamed}_size={fixed[blamed]}: {others}. "
        + _see(replace(dense, **fitting)),
    )


def check_dispatcher(block: ExpertTensorParallelConfig, topology: Topology) -> None:
    """Refuses `replicated` unless the ranks of every expert group hold the same tokens (tp % (ep * etp) == 0)."""
    peers = topology.expert_model_parallel
    if block.dispatcher == "replicated" and not tokens_are_replicated(topology):
        raise config_error(
            f"{BLOCK}.dispatcher",
            block.dispatcher,
            f"needs expert ranks to hold the same tokens: tp {topology.tp} is not a multiple of etp {topology.etp} x "
            f"ep {topology.ep} = {peers}",
            works=("auto", *DISPATCHERS[1:]),
        )


def check_layer(
    topology: Topology, path: str, *, num_experts: int, intermediate_size: int, spare_experts: int = 0
) -> None:
    """Checks one experts module: ep must divide its experts (E), etp their intermediate size (I).

    Args:
        path: the module's dotted path, for the message.
        spare_experts: rows that follow those of the experts; ep must divide them too.

    Raises:
        ConfigError: names the layer and the sizes that divide it and still tile this world.
    """
    world, pp, etp, ep = topology.world, topology.pp, topology.etp, topology.ep
    stages = f", pp={pp}" if pp > 1 else ""
    for name, size, other, fixed, what, total in (
        ("ep", ep, "etp", etp, "number of experts", num_experts),
        ("ep", ep, "etp", etp, "number of experts without weights of their own", spare_experts),
        ("etp", etp, "ep", ep, "intermediate size", intermediate_size),
    ):
        if total % size:
            works = [value for value in _tiling(world, fixed * pp) if total % value == 0]
            raise config_error(
                f"{BLOCK}.{name}_size",
                size,
                f"cannot shard {path}: {what} {total} is not divisible by {size}",
                label=f"Sizes that work with world_size={world}, {other}_size={fixed}{stages}",
                works=works,
                next_step=_see(replace(topology, **{name: _nearest(works, size)})),
            )


def layout_table(topology: Topology, block: ExpertTensorParallelConfig) -> list[tuple[str, str]]:
    """Rows (name, value) of the resolved layout, dense path first, for the one table that is logged."""
    dense = [(name, str(getattr(topology, name))) for name in ("world", "tp", "cp", "pp", "dp")]
    experts = [(name, str(getattr(topology, name))) for name in ("etp", "ep", "edp")]
    if block.etp_size == "auto":
        experts[0] = ("etp", f"{topology.etp} (auto: = tp)")
    return [*dense, *experts, ("dispatcher", block.dispatcher)]


def _tiling(world: int, others: int) -> list[int]:
    """Sizes that tile the world beside a product of the other sizes; empty if that product alone does not."""
    rest = 0 if world % others else world // others
    return [size for size in range(1, rest + 1) if rest % size == 0]


def _nearest(sizes: list[int], wanted: int) -> int:
    """The largest size that is not above `wanted`; 1 when there is none."""
    return max((size for size in sizes if size <= wanted), default=1)


def _see(topology: Topology) -> str:
    """The command that shows a layout that works."""
    axes = ("tp", "cp", "pp", "etp", "ep")
    # etp defaults to tp on the command line, so it is always spelt out.
    flags = [f"--{axis} {getattr(topology, axis)}" for axis in axes if axis == "etp" or getattr(topology, axis) > 1]
    return " ".join(["See: ds-etp topology", f"--world {topology.world}", *flags])
