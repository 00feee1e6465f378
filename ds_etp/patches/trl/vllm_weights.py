"""TRL's weight sync with vLLM (1.11 to 1.16) for models whose experts are split.

Its iterator takes `param.data` of every parameter, which is this rank's shard, and merges adapters in place, which
ZeRO-3's partitions and split layers can't have done to them. Here it goes over the whole parameters instead, merged
one layer at a time. Can go when TRL asks the engine for its parameters.

Syncs without that iterator send shards as if they were the parameters, and are refused: `VLLMGeneration` before
1.11, and trainers with a sync of their own (GRPO and RLOO before 0.28, GOLD before 1.0, online DPO in every release).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ds_etp.errors import config_error
from ds_etp.parameters.read import reader_of
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.deepspeed.engine_of import engine_of
from ds_etp.patches.peft.expert_lora import is_peft_model
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.versions import tested_range, warn_if_untested

_MODULE = "trl.generation.vllm_generation"
_ITERATOR = "_iter_named_params"
_SYNC = "sync_weights"
_OWN_SYNC = "_move_model_to_vllm"
_WITH_OWN_SYNC = (
    ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    ("trl.trainer.rloo_trainer", "RLOOTrainer"),
    ("trl.trainer.online_dpo_trainer", "OnlineDPOTrainer"),
    ("trl.experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer"),
    ("trl.experimental.gold.gold_trainer", "GOLDTrainer"),
)


def install_vllm_weights() -> None:
    """Patches TRL where it is in use. For models that aren't split it does nothing, so that it stays."""
    for module, name in _WITH_OWN_SYNC:
        trainer = getattr(sys.modules.get(module), name, None)
        if trainer is not None and _OWN_SYNC in vars(trainer):
            MethodPatch(trainer, _OWN_SYNC, _refused).apply()
    host = getattr(sys.modules.get(_MODULE), "VLLMGeneration", None)
    if host is None:
        return
    if _ITERATOR in vars(host):
        MethodPatch(host, _ITERATOR, _whole_parameters).apply()
    if _SYNC in vars(host):
        MethodPatch(host, _SYNC, _checked_host if _ITERATOR in vars(host) else _refused).apply()


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_of(self.model) is not None:
            raise config_error(
                "use_vllm",
                True,
                f"sends vLLM the parameters that a rank holds, shards of the experts: {type(self).__name__} of TRL "
                f"{version('trl')} gives ds_etp no place to put whole ones in",
                works="false",
                next_step=f"Trainers that sync by VLLMGeneration work with TRL {tested_range('trl.vllm')}.",
            )
        return original(self, *args, **kwargs)

    return sync


def _checked_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sync_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_of(self.model) is not None:
            check_signatures("trl.vllm")
            warn_if_untested("trl.vllm")
        return original(self, *args, **kwargs)

    return sync_weights


def _whole_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _iter_named_params(self: Any) -> Iterator[tuple[str, Tensor]]:
        engine = engine_of(self.model)
        if engine is None:
            yield from original(self)
            return
        # Each rank has a vLLM of its own beside it, or rank 0 sends everything to a server.
        to_rank = 0 if self.mode == "server" else None
        reader = reader_of(engine, to_rank=to_rank, merge_adapters=is_peft_model(self.model))
        for name, tensor in reader.items():
            if tensor is None:  # TRL looks at shape and type on every rank
                dtype, shape = reader.specs[name]
                tensor = torch.empty(shape, dtype=dtype, device="meta")
            yield self._fix_param_name_to_vllm(name), tensor

    return _iter_named_params
