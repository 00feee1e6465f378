"""Expert tensor parallelism for Hugging Face MoE models under DeepSpeed.

    import ds_etp

    ds_etp.register()  # before deepspeed.initialize

Names are imported when they are first used: the planner's part works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_etp.errors import ConfigError
    from ds_etp.extension import register, unregister
    from ds_etp.topology import Topology

__version__ = "0.1.0"
__all__ = ["ConfigError", "Topology", "initialize", "register", "unregister"]

_HOMES = {
    "ConfigError": "ds_etp.errors",
    "Topology": "ds_etp.topology",
    "register": "ds_etp.extension",
    "unregister": "ds_etp.extension",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Registers the extension and calls `deepspeed.initialize` with the same arguments."""
    import deepspeed

    from ds_etp.extension import register

    register()
    return deepspeed.initialize(*args, **kwargs)
