"""Patterns of module paths in a tp_plan, transformers' map from patterns to tensor-parallel styles."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=4096)
def module_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern of module paths, for `fullmatch`.

    Args:
        pattern: `*` stands for one part of a path, such as a layer's number; leading parts (`model.`) may be left out.
    """
    return re.compile(r"(?:.+\.)?" + "[^.]+".join(map(re.escape, pattern.split("*"))))
