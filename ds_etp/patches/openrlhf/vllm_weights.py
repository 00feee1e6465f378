"""OpenRLHF's weight sync with vLLM (0.11.0), of models whose experts are split.

At ZeRO-3 without tensor parallelism it gathers one parameter at a time by `deepspeed.zero.GatheredParameters`, which
gives whole ones. At other stages it takes `param.data`, and under AutoTP what AutoTP has split is put together, experts
are not: shards under the whole's names. That is refused. Can go when OpenRLHF asks the engine for its parameters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ds_etp.errors import config_error
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.deepspeed.engine_of import engine_of

_MODULE = "openrlhf.trainer.ray.ppo_actor"
_SYNC = "broadcast_to_vllm"
_WHERE = "sends vLLM the parameters that rank 0 holds, shards of the experts"


def install_vllm_weights() -> None:
    """Patches OpenRLHF where it is in use. For models that aren't split it does nothing, so that it stays."""
    host = getattr(sys.modules.get(_MODULE), "ActorPPOTrainer", None)
    if host is not None and _SYNC in vars(host):
        MethodPatch(host, _SYNC, _only_whole).apply()


def _only_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def broadcast_to_vllm(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(self.actor.model.module)
        if engine is not None:
            stage, tp = int(engine.zero_optimization_stage()), engine.ds_etp.topology.tp
            if tp > 1:
                raise config_error("ds.tensor_parallel_size", tp, _WHERE, works="1, with ds.zero_stage 3")
            if stage != 3:
                raise config_error("ds.zero_stage", stage, _WHERE, works="3, with ds.tensor_parallel_size 1")
        return original(self, *args, **kwargs)

    return broadcast_to_vllm
