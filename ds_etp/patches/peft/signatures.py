"""PEFT's functions that are overridden or called by position, as releases 0.18 to 0.21 have them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

_EXISTS, _ABSENT = "=", "-"

# What every model with adapters needs: saving, merging, and splitting attention's adapters.
TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "peft.peft_model:PeftModel": {
        "save_pretrained": "self, save_directory, ...",
        "get_base_model": "self",
    },
    "peft.tuners.tuners_utils:BaseTunerLayer": {
        "get_base_layer": "self",
        "merge": "self, ...",
        "merged_adapters": _EXISTS,
        "active_adapters": _EXISTS,
    },
    "peft.tuners.lora.layer:Linear": {"merge": "self, ...", "unmerge": "self"},
    "peft.utils.other:ModulesToSaveWrapper": {"active_adapters": _EXISTS, "disable_adapters": _EXISTS},
    "peft.utils.save_and_load": {"get_peft_model_state_dict": "model, state_dict, adapter_name, ..."},
}

# What adapters on experts need besides.
EXPERTS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "peft.tuners.lora.layer:ParamWrapper": {
        "_activate_lora": "self, active_adapters",
        # From 0.21 on; `delta_factors` does without it before.
        "get_delta_factors": ("self, adapter_name", _ABSENT),
        "get_delta_weight": "self, adapter_name, ...",
        "get_param": "self",
        "get_base_layer": "self",
        "merge": "self, ...",
        "unmerge": "self",
    },
}
