"""Router numbers of one report, and their names in DeepSpeed's monitor. No torch.

    router/global_step              the step a report was made after, the same on every layer
    router/max_over_mean/LAYER      tokens of the most loaded expert, over the mean of all
    router/entropy/LAYER            of the load, over that of an even one: 1 is even, 0 is one expert for all
    router/unused_experts/LAYER     experts without a token
    router/rows_sent/LAYER          rows of H a rank sends for each token it owns, forward
    router_tokens/LAYER/EXPERT      tokens routed to an expert since the last report

LAYER is the path of the module that holds router and experts, such as model.layers.3.mlp. Events are numbered by
samples, as DeepSpeed's own are: W&B takes no event with a smaller number than the last one's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Event = tuple[str, float, int]  # name, value, samples: what `write_events` takes

STEP = "router/global_step"
TOKENS = "router_tokens"
MAX_OVER_MEAN, ENTROPY, UNUSED, ROWS_SENT = "max_over_mean", "entropy", "unused_experts", "rows_sent"
LAYER_METRICS = (MAX_OVER_MEAN, ENTROPY, UNUSED, ROWS_SENT)


@dataclass(frozen=True)
class LayerLoad:
    """One layer between two reports, summed over all ranks.

    Attributes:
        layer: its path.
        tokens: tokens by expert; a token counts once for each of its K experts.
        owned: tokens of the batches, each once.
        rows_sent: rows of H.
    """

    layer: str
    tokens: Sequence[int]
    owned: int
    rows_sent: int

    def metrics(self) -> dict[str, float]:
        """The layer's numbers, by name."""
        return {
            MAX_OVER_MEAN: max(self.tokens) * len(self.tokens) / sum(self.tokens),
            ENTROPY: entropy(self.tokens),
            UNUSED: sum(count == 0 for count in self.tokens),
            ROWS_SENT: self.rows_sent / self.owned,
        }


def entropy(tokens: Sequence[int]) -> float:
    """The entropy of a load, over that of an even one."""
    if len(tokens) == 1:
        return 1.0
    total = sum(tokens)
    return math.fsum(-count / total * math.log(count / total) for count in tokens if count) / math.log(len(tokens))


def events(loads: Sequence[LayerLoad], step: int, samples: int, *, by_expert: bool) -> Iterator[Event]:
    """One report. A layer that nothing was trained with has none.

    Args:
        loads: by layer.
        step, samples: how far the training is.
        by_expert: whether to tell the tokens of each expert.
    """
    yield STEP, step, samples
    for load in loads:
        if not sum(load.tokens):
            continue
        for name, value in load.metrics().items():
            yield f"router/{name}/{load.layer}", value, samples
        if by_expert:
            for expert, count in enumerate(load.tokens):
                yield f"{TOKENS}/{load.layer}/{expert}", count, samples
