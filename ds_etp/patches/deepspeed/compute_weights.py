"""The weights that an engine computes with, read where DeepSpeed (0.19.5 to 0.19.8) keeps them at rest.

At ZeRO-3 from each rank's partition (`ds_tensor`), gathered without making the parameter available: nothing has to be
put back, so that a reader may stop between any two parameters.
"""

from __future__ import annotations

from typing import Any

from ds_etp.checkpoint.states import EngineStates
from ds_etp.patches.deepspeed.optimizer_states import DeepSpeedStates


class _ComputeWeights(DeepSpeedStates):
    """`EngineStates` in which no parameter has a master weight."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, None
        self._optimizer_tensors, self._param_states, self.optimizer_class = [], {}, None


def compute_weights(engine: Any) -> EngineStates:
    """An engine's parameters in the type they compute in, whether or not they have fp32 master weights."""
    return _ComputeWeights(engine)
