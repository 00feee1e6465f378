"""PEFT's functions that are overridden or called by position, as release 0.21 has them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "peft.peft_model:PeftModel": {
        "save_pretrained": "self, save_directory, ...",
        "get_base_model": "self",
    },
    "peft.tuners.lora.layer:ParamWrapper": {
        "_activate_lora": "self, active_adapters",
        "get_delta_factors": "self, adapter_name",
        "get_delta_weight": "self, adapter_name, ...",
        "get_param": "self",
        "get_base_layer": "self",
        "merge": "self, ...",
        "unmerge": "self",
    },
    "peft.utils.save_and_load": {"get_peft_model_state_dict": "model, state_dict, adapter_name, ..."},
}
