"""An ordinary Trainer script that knows of neither DeepSpeed nor ds_etp: `accelerate launch` brings both.

Prints one JSON line on rank 0: what was logged, and the shape of an expert parameter on that rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import Trainer

from tests.models import make_model
from tests.trainer.runs import Job, Sequences, arguments, outcome


def main() -> None:
    """Trains the default job."""
    job, folder = Job(), Path(sys.argv[1])
    args = arguments(job, folder, int(os.environ["WORLD_SIZE"]), None)
    trainer = Trainer(
        model=make_model(job.family),
        args=args,
        train_dataset=Sequences(job.train),
        eval_dataset=Sequences(job.held_out, first=500),
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        logged = outcome(trainer)
        shape = list(trainer.model.model.layers[0].mlp.experts.down_proj.shape)
        line = {"losses": logged.losses, "norms": logged.norms, "evaluations": logged.evaluations, "expert": shape}
        # One write: what other ranks log can't land inside the line.
        os.write(1, f"\n{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
