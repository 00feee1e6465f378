"""accelerate's functions that are patched, as releases 1.11 to 1.16 have them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

_ABSENT = "-"

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "accelerate.accelerator:Accelerator": {
        "get_state_dict": "self, model, unwrap",
        "save_state": "self, output_dir, ...",
    },
    # Without it nothing looks for "auto".
    "accelerate.utils.dataclasses:DeepSpeedPlugin": {"fill_match": ("self, ds_key_long, ...", _ABSENT)},
    # What TRL's completions go through.
    "accelerate.utils.operations": {"send_to_device": "tensor, device, ..."},
}
