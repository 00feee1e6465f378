"""Hugging Face names of a module's parameters and buffers.

A module's own names, but for a pipeline stage: there the attribute `hf_names` of the module maps the beginning of a
local name ("3.", "tied_modules.embed.") to that of the Hugging Face name ("model.layers.2.").
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class HubNames:
    """From the local name of one of a module's parameters or buffers to its Hugging Face name."""

    def __init__(self, module: nn.Module) -> None:
        given: Mapping[str, str] = getattr(module, "hf_names", {})
        self._prefixes = sorted(given.items(), key=lambda pair: -len(pair[0]))

    def __call__(self, name: str) -> str:
        """The longest prefix that is known counts. A name without one is its own."""
        for local, theirs in self._prefixes:
            if name.startswith(local):
                return theirs + name.removeprefix(local)
        return name
