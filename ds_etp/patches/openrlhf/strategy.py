"""OpenRLHF's `DeepspeedStrategy` (0.11.0): the block in the configs it builds, and whole models in its saves.

It builds DeepSpeed's config from its command line, so that there is no file to write the block into. Models without
experts (a reward model or a critic of another family) get none.

Its `save_model` writes rank 0's `state_dict` at ZeRO 0 to 2, and PEFT adapters from rank 0 at any stage: shards, which
ds_etp refuses to write. For a split model it is `ds_etp.save_pretrained` here. Can go when OpenRLHF takes entries of
the config from outside, and saves through its engine.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ds_etp.checkpoint.export_api import save_pretrained
from ds_etp.config.deepspeed import BLOCK
from ds_etp.experts.registry import find_experts
from ds_etp.patches.base import MethodPatch
from ds_etp.patches.deepspeed.engine_of import engine_of
from ds_etp.patches.signatures import check_signatures

_BLOCK = "_ds_etp_block"
_DENSE = "_ds_etp_dense"


def patch_strategy(strategy: Any, block: Mapping[str, Any]) -> None:
    """Adds the block to what the class builds from now on.

    Args:
        strategy: the class.
        block: what stands under `expert_tensor_parallel` in a config file.

    Raises:
        ConfigError: this release of OpenRLHF has other functions.
    """
    check_signatures("openrlhf")
    setattr(strategy, _BLOCK, copy.deepcopy(dict(block)))
    for name in ("get_ds_train_config", "get_ds_eval_config"):
        MethodPatch(strategy, name, _with_block).apply()
    for name in ("_ds_init_train_model", "_ds_init_eval_model"):
        MethodPatch(strategy, name, _for_this_model).apply()
    MethodPatch(strategy, "save_model", _whole_save).apply()


def _with_block(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_ds_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if not vars(self).get(_DENSE, False):
            config[BLOCK] = copy.deepcopy(getattr(self, _BLOCK))
        return config

    return get_ds_config


def _for_this_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _ds_init_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _DENSE, model is not None and not find_experts(model))
        try:
            return original(self, model, *args, **kwargs)
        finally:
            delattr(self, _DENSE)

    return _ds_init_model


def _whole_save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_model(self: Any, model: Any, tokenizer: Any, output_dir: Any, **kwargs: Any) -> Any:
        engine = engine_of(self._unwrap_model(model))
        if engine is None:
            return original(self, model, tokenizer, output_dir, **kwargs)
        save_pretrained(engine, output_dir, tokenizer=tokenizer, **kwargs)
        dist.barrier()
        return None

    return save_model
