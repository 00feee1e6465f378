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
    from ds_etp.errors import CheckpointError, ConfigError
    from ds_etp.extension import register, unregister
    from ds_etp.families import register_layout
    from ds_etp.fused import fuse_experts
    from ds_etp.layouts import Cut
    from ds_etp.patches.checkpoints import load_checkpoint, save_checkpoint
    from ds_etp.patches.exports import save_pretrained
    from ds_etp.pretrained import from_pretrained
    from ds_etp.topology import Topology

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "Cut",
    "Topology",
    "from_pretrained",
    "fuse_experts",
    "initialize",
    "load_checkpoint",
    "pipeline",
    "register",
    "register_layout",
    "save_checkpoint",
    "save_pretrained",
    "unregister",
]

_HOMES = {
    "CheckpointError": "ds_etp.errors",
    "ConfigError": "ds_etp.errors",
    "Cut": "ds_etp.layouts",
    "Topology": "ds_etp.topology",
    "from_pretrained": "ds_etp.pretrained",
    "fuse_experts": "ds_etp.fused",
    "load_checkpoint": "ds_etp.patches.checkpoints",
    "register": "ds_etp.extension",
    "register_layout": "ds_etp.families",
    "save_checkpoint": "ds_etp.patches.checkpoints",
    "save_pretrained": "ds_etp.patches.exports",
    "unregister": "ds_etp.extension",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "pipeline":
        return import_module("ds_etp.pipeline")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Registers the extension and calls `deepspeed.initialize` with the same arguments."""
    import deepspeed

    from ds_etp.extension import register

    register()
    return deepspeed.initialize(*args, **kwargs)
