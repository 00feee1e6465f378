"""What is known of trainers under tensor parallelism, of all packages: looked at when arguments meet a config."""

from __future__ import annotations

from ds_etp.patches.base import MethodPatch
from ds_etp.patches.swift.loss_scale import patch_loss_scale
from ds_etp.patches.transformers.token_average import check_token_average
from ds_etp.patches.transformers.trainer_arguments import argument_patches
from ds_etp.patches.trl.tp_rollouts import patch_rollouts


def trainer_patches() -> list[MethodPatch]:
    """The patches, not yet applied. Those of trainers themselves stay when they are reverted, and do nothing then."""
    return argument_patches((check_token_average, patch_rollouts, patch_loss_scale))
