"""What workers import sooner or later, imported once before they are forked."""

from __future__ import annotations

import contextlib
import importlib

import tests.worker  # noqa: F401

# DeepSpeed imports these when it makes its first engine, transformers a model when it is first used.
_LATE = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.tp_plan_converter",
    "deepspeed.ops.op_builder.all_ops",
    "torch.utils.cpp_extension",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.aria.modeling_aria",
)
for _name in _LATE:
    with contextlib.suppress(ImportError):  # not every supported version has all of them
        importlib.import_module(_name)
