"""The training job: batch sizes, ZeRO stage, activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from ds_etp.parallel.topology import Topology

# Elements of ZeRO's reduce bucket. The planner's config sets it; DeepSpeed's own default, 5e8, takes 1 GB.
BUCKET = 200_000_000


@dataclass(frozen=True)
class Job:
    """Batch sizes and how they are trained.

    Attributes:
        sequence, micro_batch: tokens of a sequence, sequences of a rank's micro batch.
        zero_stage: of ZeRO, 0 to 3.
        recompute: activation checkpointing of whole layers.
        itemsize: bytes of a parameter and of an activation while training: 2 in bf16, 4 in fp32.
        bucket: elements of ZeRO's reduce bucket.
        micro_batches: micro batches of a step (gradient accumulation).
    """

    sequence: int
    micro_batch: int
    zero_stage: int
    recompute: bool = True
    itemsize: int = 2
    bucket: int = BUCKET
    micro_batches: int = 1

    def tokens(self, topology: Topology) -> int:
        """T."""
        return self.sequence * self.micro_batch // topology.cp


def in_flight(topology: Topology, job: Job, pipeline_stage: int) -> int:
    """Micro batches whose activations a pipeline stage holds at once: 1F1B goes as far ahead as there are stages."""
    return min(topology.pp - pipeline_stage, job.micro_batches)
