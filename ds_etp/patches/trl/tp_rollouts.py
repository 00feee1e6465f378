"""TRL's GRPO and RLOO trainers give tensor-parallel ranks the same prompts, completions and rewards.

TRL (0.24 to 1.16) counts every rank as a data-parallel one. Under AutoTP, whose ranks of a group must hold one batch,

- the sampler reserves prompts for all ranks, of which the data-parallel ones take a part and, where completions serve
  more than one step, never get to the rest;
- each rank is seeded by its number, so that ranks of a group sample other tokens, and shuffle them in another order;
- a vLLM engine, a tool or a reward function may answer each rank of a group differently;
- rewards are gathered from all ranks, a group's several times over: averages stay the same, deviations over a whole
  batch don't.

Can go when TRL asks Trainer for its data-parallel size, as Trainer's own data loaders do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_etp.config.deepspeed import AUTOTP
from ds_etp.errors import config_error
from ds_etp.parallel.process_groups import ProcessGroupInfo
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.transformers.trainer_arguments import names_in, tp_of
from ds_etp.patches.versions import warn_if_untested

_TRAINERS = {
    "GRPOConfig": ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    "RLOOConfig": ("trl.trainer.rloo_trainer", "RLOOTrainer"),
}


def patch_rollouts(args: Any, tp: int) -> None:
    """Reaches TRL's trainers when their arguments meet a config with our block and tensor parallelism.

    The trainers' patches stay. They do nothing without tensor parallelism and the block.

    Args:
        args: of any trainer.
        tp: ranks that hold the same batch, above 1.

    Raises:
        ConfigError: an option that is wrong with tensor parallelism.
    """
    names = names_in("trl", args)
    if not names:
        return
    if getattr(args, "precompute_ref_log_probs", False):
        # TRL would give samples the log-probabilities of others, in silence.
        raise config_error(
            "precompute_ref_log_probs",
            True,
            f"is wrong under {AUTOTP}={tp}: TRL gathers the reference's log-probabilities from all ranks in turn, "
            "those of a tensor-parallel group several times, and numbers samples by their place",
            works="false",
        )
    check_signatures("trl")
    warn_if_untested("trl")
    for module, trainer in (_TRAINERS[name] for name in names if name in _TRAINERS):
        _patch(getattr(import_module(module), trainer))


def _patch(trainer: type) -> None:
    for name, make in (
        ("_get_train_sampler", _prompts_of_data_ranks),
        ("_generate_and_score_completions", _alike_noise),
        ("_generate", _alike_completions),
        ("_calculate_rewards", _alike_rewards),
    ):
        MethodPatch(trainer, name, make).apply()


def _tp_peers(trainer: Any) -> ProcessGroupInfo | None:
    """The group of this rank, once there is an engine; None where it is alone."""
    engine = trainer.model_wrapped
    extension = vars(engine).get("ds_etp")
    groups = None if extension is None else extension.groups
    return groups.tp if groups is not None and groups.tp.size > 1 else None


def _prompts_of_data_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_train_sampler(self: Any, *rest: Any, **kwargs: Any) -> Any:
        tp, args = tp_of(self), self.args
        if tp == 1:
            return original(self, *rest, **kwargs)
        _check_groups(self, tp)
        for_all_ranks = args.generation_batch_size
        args.generation_batch_size = for_all_ranks // tp
        try:
            return original(self, *rest, **kwargs)
        finally:
            args.generation_batch_size = for_all_ranks

    return _get_train_sampler


def _check_groups(trainer: Any, tp: int) -> None:
    """Refuses what the same rewards, several times over, would change.

    Raises:
        ConfigError: before the first step.
    """
    args = trainer.args
    rows = args.per_device_train_batch_size * args.steps_per_generation
    where = f"under {AUTOTP}={tp}"
    if rows % trainer.num_generations:
        raise config_error(
            "num_generations",
            trainer.num_generations,
            f"doesn't divide the completions of a rank, per_device_train_batch_size {args.per_device_train_batch_size} "
            f"x steps_per_generation {args.steps_per_generation} = {rows}, {where}: TRL compares completions of one "
            "prompt rank by rank, and ranks of a tensor-parallel group have the same ones",
            works=[size for size in range(2, rows + 1) if rows % size == 0],
        )
    for key, wrong, works in (
        ("scale_rewards", "batch", "group, none"),
        ("multi_objective_aggregation", "normalize_then_sum", "sum_then_normalize"),
        ("normalize_advantages", True, "false"),
    ):
        if getattr(args, key, None) == wrong:
            raise config_error(
                key,
                wrong,
                f"is not known to be right {where}: TRL takes the deviation of all ranks' rewards, in which those of "
                "a tensor-parallel group are several times",
                works=works,
            )


def _alike_noise(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _generate_and_score_completions(self: Any, *rest: Any, **kwargs: Any) -> Any:
        tp = _tp_peers(self)
        if tp is not None:
            _share_generators(tp, self.accelerator.device)
        return original(self, *rest, **kwargs)

    return _generate_and_score_completions


def _share_generators(tp: ProcessGroupInfo, device: torch.device) -> None:
    """Ranks of a tensor-parallel group go on from the first one's random numbers."""
    module = getattr(torch, device.type, None)
    generators: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = [
        (torch.get_rng_state, torch.set_rng_state)
    ]
    if device.type != "cpu" and module is not None:
        generators.append((module.get_rng_state, module.set_rng_state))
    for read, write in generators:
        state = read().to(device)
        dist.broadcast(state, src=tp.ranks[0], group=tp.group)
        write(state.cpu())


def _alike_completions(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _generate(self: Any, *rest: Any, **kwargs: Any) -> Any:
        from accelerate.utils import send_to_device  # every trainer has loaded it

        result = original(self, *rest, **kwargs)
        tp = _tp_peers(self)
        if tp is None:
            return result
        values = [result]
        dist.broadcast_object_list(values, src=tp.ranks[0], group=tp.group, device=self.accelerator.device)
        # TRL 0.24 has images' pixels among them, which come on the sender's device.
        return send_to_device(values[0], self.accelerator.device)

    return _generate


def _alike_rewards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _calculate_rewards(self: Any, *rest: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = original(self, *rest, **kwargs)
        if _tp_peers(self) is None:
            return rewards
        # Gathered from all ranks in turn: each takes its group's first one's.
        topology = self.model_wrapped.ds_etp.topology
        first = [topology.group_of("tp", rank)[0] for rank in range(topology.world)]
        by_rank = rewards.view(topology.world, -1, *rewards.shape[1:])
        return by_rank[first].reshape(rewards.shape)

    return _calculate_rewards
