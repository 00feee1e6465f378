"""transformers models on the meta device, built from a config without memory (5.0 to 5.24)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ds_etp.errors import ConfigError


def read_config(source: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a model.

    Args:
        source: a folder with a config.json, that file, or an id on the Hugging Face hub.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ConfigError: says in one line why there is none.
    """
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() and (path.is_dir() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source[0] in "./~"):
        raise ConfigError(f"--model {source}: there is no file {file}.")
    try:
        # False, not None: transformers would ask at the terminal.
        return AutoConfig.from_pretrained(str(path) if path.exists() else source, trust_remote_code=trust_remote_code)
    except Exception as error:  # OSError from the hub, KeyError, validation errors of several kinds
        raise _fault(source, "its config cannot be read", error) from None


def build_on_meta(
    config: Any, source: str, *, trust_remote_code: bool = False, implementation: str | None = None
) -> nn.Module:
    """The model that `from_pretrained` would load: the class that its config names, in the dtype it names.

    Args:
        config: from `read_config`.
        source: what the model is called, for messages.
        trust_remote_code: whether code that comes with the model may run.
        implementation: the experts implementation; None: transformers' choice.

    Raises:
        ConfigError: says in one line why it cannot be built.
    """
    chosen: dict[str, Any] = {} if implementation is None else {"experts_implementation": implementation}
    try:
        model: nn.Module = on_meta(_builder(config, trust_remote_code), config, **chosen)
    except Exception as error:  # a config can be wrong in as many ways as there are families
        raise _fault(source, "transformers cannot build it", error) from None
    return model


def on_meta(build: Callable[..., Any], config: Any, **options: Any) -> Any:
    """What `build` makes of a config, its parameters and buffers on the meta device."""
    with torch.device("meta"):
        return build(config, **options)


def named_class(names: Iterable[str]) -> Any:
    """The first name's class that is a model of transformers; None where there is none."""
    found = (getattr(transformers, name, None) for name in names)
    return next((cls for cls in found if isinstance(cls, type) and issubclass(cls, PreTrainedModel)), None)


def _builder(config: Any, trust_remote_code: bool) -> Any:
    remote = trust_remote_code and hasattr(config, "auto_map")
    named = named_class(getattr(config, "architectures", None) or [])
    if named is not None and not remote:
        return named._from_config
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map")
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return partial(auto.from_config, trust_remote_code=trust_remote_code)


def _fault(source: str, what: str, error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    hint = " If you trust that code: --trust-remote-code." if "trust_remote_code" in str(error) else ""
    return ConfigError(f"--model {source}: {what}: {reason}{hint}")
