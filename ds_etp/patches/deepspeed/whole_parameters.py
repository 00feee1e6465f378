"""All that makes hosts see whole parameters of one engine's split model, where they ask DeepSpeed for them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_etp.parallel.process_groups import ExpertGroups
from ds_etp.patches.deepspeed.engine_of import remember_engine
from ds_etp.patches.deepspeed.gathered_parameters import install_gathered_parameters
from ds_etp.patches.deepspeed.split_parameters import mark_split_parameters
from ds_etp.patches.openrlhf import vllm_weights as openrlhf
from ds_etp.patches.trl import vllm_weights as trl


def install_whole_parameters(engine: Any, model: nn.Module, groups: ExpertGroups) -> None:
    """For an engine whose experts are split, before ZeRO takes its parameters."""
    remember_engine(engine, model)
    if int(engine.zero_optimization_stage()) == 3:
        mark_split_parameters(model, groups)
        install_gathered_parameters()
    trl.install_vllm_weights()
    openrlhf.install_vllm_weights()
