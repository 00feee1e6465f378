"""ds_etp for Axolotl (0.19.0): a plugin that registers it before the model is loaded, and saves on all ranks.

    plugins:
      - ds_etp.integrations.axolotl.ExpertTensorParallelPlugin
    deepspeed: ds.json  # with an expert_tensor_parallel block

Axolotl saves the trained model by `save_pretrained` on rank 0 under ZeRO 0 to 2, where rank 0 has its shards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin

from ds_etp.config.block import parse_block
from ds_etp.config.deepspeed import BLOCK
from ds_etp.config.file import read_config_file
from ds_etp.errors import config_error


@dataclass(frozen=True)
class _Refusal:
    """A key of Axolotl's config that doesn't work with split experts."""

    key: str
    refused: Callable[[Any], bool]
    rule: str
    works: str


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


_KERNELS = "takes experts kernels of Axolotl's own, which have not been shown to give right numbers on expert shards"
_REFUSALS = (
    _Refusal(
        "expert_parallel_size",
        _above_one,
        f"is Axolotl's own expert parallelism, and would split the same experts as {BLOCK}",
        f"1, and {BLOCK}.ep_size in the DeepSpeed config",
    ),
    _Refusal("use_scattermoe", bool, _KERNELS, "false, and experts_implementation: grouped_mm"),
    _Refusal("use_sonicmoe", bool, _KERNELS, "false, and experts_implementation: grouped_mm"),
    _Refusal(
        "expert_backend",
        lambda value: value is not None and str(value).lower() not in ("eager", "builtin"),
        _KERNELS,
        "eager, builtin",
    ),
    _Refusal(
        "experts_implementation",
        lambda value: value not in (None, "eager", "grouped_mm", "batched_mm"),
        _KERNELS,
        "eager, grouped_mm, batched_mm",
    ),
    _Refusal("quantize_moe_experts", bool, "packs the experts' weights, which then can't be split", "false"),
    _Refusal(
        "plugins",
        lambda value: any(".densemixer." in str(name) for name in value or ()),
        "has densemixer, which replaces the forward of blocks around the experts",
        "a list without it",
    ),
    _Refusal(
        "tensor_parallel_size",
        _above_one,
        "splits attention by transformers, of which DeepSpeed knows nothing",
        "1, and tensor_parallel.autotp_size in the DeepSpeed config",
    ),
    _Refusal(
        "context_parallel_size",
        _above_one,
        "shares sequences by ring attention, which has not been shown to give right numbers with expert shards",
        "1",
    ),
    _Refusal("fsdp_config", bool, "can't be combined with DeepSpeed, which splits the experts", "no such key"),
)


def check_config(cfg: Mapping[str, Any]) -> None:
    """Refuses what doesn't work with split experts, by name.

    Args:
        cfg: Axolotl's config, parsed or as it was written.

    Raises:
        ConfigError: it names the key. The DeepSpeed config's block, too, has to be there.
    """
    given = cfg.get("deepspeed")
    if not given:
        raise config_error("deepspeed", given, f"is not set, and ds_etp splits what a DeepSpeed config with an {BLOCK} "
                           "block says", works="a DeepSpeed JSON file with that block")  # fmt: skip
    ds_config = given if isinstance(given, Mapping) else read_config_file(Path(given))
    if BLOCK not in ds_config:
        raise config_error("deepspeed", str(given), f"has no {BLOCK} block: nothing would be split",
                           works=f'a DeepSpeed config with "{BLOCK}": {{}}')  # fmt: skip
    if parse_block(ds_config) is None:
        return  # not enabled: nothing is split
    for refusal in _REFUSALS:
        value = cfg.get(refusal.key)
        if refusal.refused(value):
            raise config_error(refusal.key, value, refusal.rule, works=refusal.works)


class ExpertTensorParallelPlugin(BasePlugin):  # type: ignore[misc]  # Axolotl has no type information
    """Registers ds_etp and makes the final save on all ranks."""

    def register(self, cfg: Any) -> None:
        """Called when Axolotl reads its config. Checks it, before anything is loaded."""
        check_config(cfg)

    def pre_model_load(self, cfg: Any) -> None:
        """Called before the model is loaded, in every process. The config may have gained defaults by now."""
        from ds_etp.engine import register

        check_config(cfg)
        register()

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Called when the trainer is made."""
        from ds_etp.integrations.trainer import SaveOnAllRanks

        return [SaveOnAllRanks(trainer, cfg.get("output_dir") or trainer.args.output_dir)]
