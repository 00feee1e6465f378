"""Which adapters of PEFT go with split experts: asked before a group is made or the model changed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from ds_etp.errors import config_error
from ds_etp.experts.layout import ExpertsLayout, full_shape
from ds_etp.patches.peft.delta_factors import METHOD
from ds_etp.patches.peft.expert_lora import expert_wrappers, is_adapted, is_peft_model
from ds_etp.patches.signatures import check_signatures
from ds_etp.patches.versions import PEFT_DELTA_FACTORS, other_ways, tested_range, warn_if_untested


def check_adapters(model: Any, layouts: Mapping[str, ExpertsLayout]) -> None:
    """Refuses adapters on experts that this module doesn't know how to cut. Does nothing without PEFT.

    Args:
        model: not split yet.
        layouts: of its experts modules, by path.

    Raises:
        ConfigError: names the layer, the adapter's kind and what works.
    """
    if not is_adapted(model) and not is_peft_model(model):
        return
    from peft.tuners.lora.layer import ParamWrapper

    check_signatures("peft")
    warn_if_untested("peft")

    if is_peft_model(model) and any(config.is_prompt_learning for config in model.peft_config.values()):
        raise config_error(
            "peft_config",
            next(config.peft_type.value for config in model.peft_config.values() if config.is_prompt_learning),
            "learns prompts, which was not tried with ds_etp",
            works="adapters in layers, such as LoraConfig",
        )
    if not is_peft_model(model):
        raise config_error(
            "model",
            type(model).__name__,
            "has adapters inside and no PeftModel around it, so that nobody would save them",
            works="peft.get_peft_model(model, config), not inject_adapter_in_model or model.add_adapter",
        )
    if any(True for path in layouts for _ in expert_wrappers(model, path)):
        _check_release_for_experts()
    for path, layout in layouts.items():
        for outer, wrapper in expert_wrappers(model, path):
            kind = f"{type(wrapper).__module__.split('.')[-2]}.{type(wrapper).__name__}"
            name = getattr(wrapper, "parameter_name", None)
            matrices = name in layout.parameters and len(full_shape(getattr(wrapper.get_base_layer(), name))) == 3
            if type(wrapper) is not ParamWrapper or not matrices:
                raise config_error(
                    "peft_config",
                    kind,
                    f"adapts {name or 'experts'} in a way that ds_etp cannot split",
                    where=outer,
                    works="LoraConfig(target_parameters=[...]) on weights [E, ., .] of the experts",
                )


def _check_release_for_experts() -> None:
    """Refuses releases whose adapters on experts this package doesn't know, though it may know their others.

    Raises:
        ConfigError: names what differs, and what works with the installed release.
    """
    from peft.tuners.lora.layer import ParamWrapper

    check_signatures("peft.experts")
    found = Version(version("peft"))
    if not hasattr(ParamWrapper, METHOD) and found >= Version(PEFT_DELTA_FACTORS):
        raise config_error(
            "peft",
            str(found),
            f"has no ParamWrapper.{METHOD}, as releases from {PEFT_DELTA_FACTORS} on have: how its adapters on experts "
            "are multiplied isn't known",
            works=tested_range("peft.experts"),
            next_step=other_ways("peft.experts"),
        )
