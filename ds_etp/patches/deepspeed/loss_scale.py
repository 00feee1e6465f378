"""The numbers of DeepSpeed's loss scalers (0.18.6 to 0.19.8), which a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def loss_scale(optimizer: Any) -> dict[str, Any]:
    """A scaler's plain attributes: scale, window, counters; empty where there is none."""
    scaler = _scaler(optimizer)
    if scaler is None:
        return {}
    return {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}


def set_loss_scale(optimizer: Any, values: Mapping[str, Any]) -> None:
    """Puts them back, those that this scaler has."""
    scaler = _scaler(optimizer)
    for key, value in values.items():
        if scaler is not None and isinstance(vars(scaler).get(key), bool | int | float):
            setattr(scaler, key, value)


def _scaler(optimizer: Any) -> Any:
    for name in ("loss_scaler", "loss_scale_config"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    return None
