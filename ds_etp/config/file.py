"""DeepSpeed config files, read as DeepSpeed reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]  # comes with DeepSpeed

from ds_etp.errors import ConfigError


def read_config_file(path: str | Path) -> dict[str, Any]:
    """A config file's values: Hjson (JSON with comments and trailing commas), in which no key is given twice.

    Raises:
        ConfigError: there is no such file, or it holds no such object. It names the file.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{path}: key {key!r} is given twice.")
        return dict(pairs)

    try:
        values: object = hjson.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}.") from error
    except (hjson.HjsonDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object.")
    return values
