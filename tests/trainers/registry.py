"""The trainers that are run. One more is a module with its `TRAINER`, a requirements file, and a line here."""

from __future__ import annotations

from tests.trainers import accelerate, llamafactory, ms_swift, run_clm, trl
from tests.trainers.cases import Trainer

TRAINERS: tuple[Trainer, ...] = (
    llamafactory.TRAINER,
    ms_swift.TRAINER,
    trl.TRAINER,
    run_clm.TRAINER,
    accelerate.TRAINER,
)
