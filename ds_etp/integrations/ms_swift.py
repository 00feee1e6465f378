"""ds_etp for ms-swift (4.6): a file for `--external_plugins`, which it runs in every process before a model is loaded.

    swift sft --deepspeed ds.json --external_plugins FOLDER/ds_etp/integrations/ms_swift.py ...

where FOLDER is what `python -c "import ds_etp; print(ds_etp.__path__[0])"` prints, without its last part. Saves are
those of transformers' Trainer, on all ranks.
"""

from __future__ import annotations

import ds_etp

ds_etp.register()
