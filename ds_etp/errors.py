"""The errors users see, and the form a setting's message takes."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot work, raised on every rank before any process group is made."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, raised on every rank alike. The message names the file."""


def config_error(
    key: str,
    value: object,
    rule: str,
    *,
    where: str | None = None,
    works: Iterable[object] | str | None = None,
    label: str = "Values that work",
    next_step: str | None = None,
) -> ConfigError:
    """Builds a `ConfigError` in the house form.

    Args:
        key: dotted key as the user wrote it, such as `expert_tensor_parallel.etp_size`.
        value: what the user gave.
        rule: the rule it breaks, with its arithmetic.
        where: the layer path or file the rule was applied to.
        works: values that would work, or a sentence that names them; an empty list reads "none".
        label: what `works` lists, with what it depends on, such as `Sizes that work with world_size=16, ep_size=4`.
        next_step: what to do next.

    Returns:
        The error, for the caller to raise.
    """
    text = f"{key}={value!r} {rule}" + (f" (at {where})" if where else "")
    parts = [text if text.endswith("?") else text + "."]
    if works is not None:
        listed = works if isinstance(works, str) else ", ".join(str(item) for item in works) or "none"
        parts.append(f"{label}: {listed}.")
    if next_step:
        parts.append(next_step)
    return ConfigError(" ".join(parts))
