"""ds_etp for OpenRLHF (0.11.0), which builds DeepSpeed's config in code: two lines that add the block to it.

    from ds_etp.integrations.openrlhf import add_block

    add_block({"etp_size": 2, "ep_size": 4})  # or a DeepSpeed config file that has the block

They have to run in every process that trains, before OpenRLHF makes a model. Nothing of OpenRLHF, and no CUDA, is
touched before OpenRLHF itself imports DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_etp.activation import call_after_import, request
from ds_etp.config.block import parse_block
from ds_etp.config.deepspeed import BLOCK
from ds_etp.config.file import read_config_file
from ds_etp.errors import config_error

_MODULE = "openrlhf.utils.deepspeed.deepspeed"


def add_block(block: Mapping[str, Any] | str | Path) -> None:
    """Adds the block to every config that OpenRLHF builds from now on, and registers ds_etp.

    Args:
        block: what stands under `expert_tensor_parallel` in a DeepSpeed config file, or the path of such a file, of
            which nothing else is read.

    Raises:
        ConfigError: there is no block in the file, or one that can't be read.
    """
    if not isinstance(block, Mapping):
        given = read_config_file(Path(block))
        if BLOCK not in given:
            raise config_error("block", str(block), f"has no {BLOCK} block: nothing would be split",
                               works=f'a DeepSpeed config with "{BLOCK}": {{}}')  # fmt: skip
        content: Mapping[str, Any] = given[BLOCK]
    else:
        content = block
    parse_block({BLOCK: content})
    request()  # processes that this one starts

    def patch() -> None:
        from ds_etp.engine import register
        from ds_etp.patches.openrlhf.strategy import patch_strategy

        register()
        patch_strategy(sys.modules[_MODULE].DeepspeedStrategy, content)

    call_after_import(_MODULE, patch)
