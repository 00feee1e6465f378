"""ms-swift's functions that are patched, as release 4.6 has them.

How an entry is written: see `ds_etp.patches.signatures`.
"""

from __future__ import annotations

TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "swift.trainers.seq2seq_trainer:Seq2SeqTrainer": {
        "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    },
}
