"""TRL's weight sync with vLLM (1.16) for models whose experts are split.

Its iterator takes `param.data` of every parameter, which is this rank's shard, and merges adapters in place, which
ZeRO-3's partitions and split layers can't have done to them. Here it goes over the whole parameters instead, merged
one layer at a time. Can go when TRL asks the engine for its parameters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ds_etp.parameters.read import reader_of
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.deepspeed.engine_of import engine_of
from ds_etp.patches.peft.expert_lora import is_peft_model
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.versions import warn_if_untested

_MODULE = "trl.generation.vllm_generation"
_ITERATOR = "_iter_named_params"
_SYNC = "sync_weights"


def install_vllm_weights() -> None:
    """Patches TRL where it is in use. For models that aren't split it does nothing, so that it stays."""
    host = getattr(sys.modules.get(_MODULE), "VLLMGeneration", None)
    if host is None:
        return
    if _ITERATOR in vars(host):
        MethodPatch(host, _ITERATOR, _whole_parameters).apply()
    if _SYNC in vars(host):
        MethodPatch(host, _SYNC, _checked_host).apply()


def _checked_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sync_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_of(self.model) is not None:
            check_signatures("trl")
            warn_if_untested("trl")
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
