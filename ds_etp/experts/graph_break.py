"""torch.compile and what is sharded: one clean graph break around a module, and nothing of its call traced.

How many rows a rank's experts get changes from step to step, the host waits for their counts, and messages are started
in one function and awaited in another. Traced, each of these would break the graph at a place of its own, or compile
anew for other counts. Hooks on the module, ZeRO-3's above all, run outside of the graph with it.
"""

from __future__ import annotations

import torch
from torch import nn

from ds_etp.errors import config_error

# What the module that torch.compile makes around another calls it.
_INNER = "_orig_mod"


def not_compiled(module_class: type, what: str) -> type:
    """Takes calls of a module class out of every graph, also where a module of it is compiled by itself.

    Args:
        module_class: of modules; it gets a `__call__` and a `forward` of its own.
        what: what its modules are, for the reason that dynamo logs.

    Returns:
        The class.
    """
    reason = f"ds_etp: {what}, whose messages and row counts are the host's"
    for name in ("__call__", "forward"):
        setattr(module_class, name, torch.compiler.disable(getattr(module_class, name), reason=reason))
    return module_class


def refuse_wrapped(model: nn.Module) -> None:
    """Refuses modules that `torch.compile(module)` has put into one of its own: parameters get its name for them.

    Raises:
        ConfigError: names the module, and the ways to compile in place.
    """
    for path, module in model.named_modules():
        outer, _, name = path.rpartition(".")
        if name == _INNER:
            raise config_error(
                "model",
                f"torch.compile({type(module).__name__})",
                f"puts {_INNER!r} into the names of its parameters, and so into checkpoints and exports",
                where=outer or None,
                works="engine.compile(backend=...), model.compile(backend=...), Trainer's torch_compile=True",
                label="Ways that work",
            )
