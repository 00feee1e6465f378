"""What is wrong with the arguments of a call that reads or changes parameters, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ds_etp.errors import config_error
from ds_etp.experts.sharded import expert_parameters


def check_rank(key: str, rank: int | None) -> None:
    """Refuses what isn't a rank.

    Raises:
        ConfigError: names the argument and the ranks there are.
    """
    world = dist.get_world_size()
    if rank is not None and not 0 <= rank < world:
        raise config_error(key, rank, f"is not one of the {world} ranks", works=f"0 to {world - 1}, or None")


def check_expert_owners(engine: Any) -> None:
    """Refuses a model with experts that DeepSpeed's own MoE layers have dealt out: their shards are unknown here.

    Raises:
        ConfigError: names a parameter.
    """
    own = {id(parameter) for _, parameter in expert_parameters(engine.module)}
    for name, parameter in engine.module.named_parameters():
        if not getattr(parameter, "allreduce", True) and id(parameter) not in own:
            raise config_error(
                "expert_tensor_parallel",
                None,
                f"is not in this engine's config, and {name} was split by DeepSpeed's own expert parallelism",
                works="a config with the expert_tensor_parallel block",
            )


def check_names(names: Iterable[str], known: Sequence[str]) -> set[str]:
    """The names as a set.

    Raises:
        ConfigError: one isn't a parameter's.
    """
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name not in known:
            last = name.rpartition(".")[2]
            nearest = [other for other in known if other.endswith(f".{last}")] or list(known)
            raise config_error(
                "names", name, "is not a parameter of this model", works=nearest[:3], label="Names such as"
            )
    return set(given)
