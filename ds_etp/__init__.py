"""Expert tensor parallelism for Hugging Face MoE models under DeepSpeed.

    import ds_etp

    ds_etp.register()  # before deepspeed.initialize

Names are imported when they are first used: the planner's part works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_etp import pipeline
    from ds_etp.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
    from ds_etp.checkpoint.export_api import save_pretrained
    from ds_etp.engine import register, unregister
    from ds_etp.errors import CheckpointError, ConfigError
    from ds_etp.experts.fuse import fuse_experts
    from ds_etp.experts.layout import ShardSpec
    from ds_etp.experts.registry import register_layout
    from ds_etp.experts.sharded import ShardedExperts
    from ds_etp.loading.from_pretrained import from_pretrained
    from ds_etp.parallel.topology import Topology
    from ds_etp.parameters.edit import edit_parameters
    from ds_etp.parameters.read import full_parameters

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "ShardSpec",
    "ShardedExperts",
    "Topology",
    "edit_parameters",
    "from_pretrained",
    "full_parameters",
    "fuse_experts",
    "initialize",
    "load_checkpoint",
    "pipeline",
    "register",
    "register_layout",
    "save_checkpoint",
    "save_pretrained",
    "unregister",
    "wait_for_save",
]

_HOMES = {
    "CheckpointError": "ds_etp.errors",
    "ConfigError": "ds_etp.errors",
    "ShardSpec": "ds_etp.experts.layout",
    "ShardedExperts": "ds_etp.experts.sharded",
    "Topology": "ds_etp.parallel.topology",
    "edit_parameters": "ds_etp.parameters.edit",
    "from_pretrained": "ds_etp.loading.from_pretrained",
    "full_parameters": "ds_etp.parameters.read",
    "fuse_experts": "ds_etp.experts.fuse",
    "load_checkpoint": "ds_etp.checkpoint.api",
    "register": "ds_etp.engine",
    "register_layout": "ds_etp.experts.registry",
    "save_checkpoint": "ds_etp.checkpoint.api",
    "save_pretrained": "ds_etp.checkpoint.export_api",
    "unregister": "ds_etp.engine",
    "wait_for_save": "ds_etp.checkpoint.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "pipeline":
        return import_module("ds_etp.pipeline")
    aliases = import_module("ds_etp.aliases")
    if name in aliases.PUBLIC_NAMES:
        return aliases.renamed_class(name, __getattr__(aliases.PUBLIC_NAMES[name]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Registers the extension and calls `deepspeed.initialize` with the same arguments."""
    import deepspeed

    from ds_etp.engine import register

    register()
    return deepspeed.initialize(*args, **kwargs)
