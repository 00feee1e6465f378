"""Hugging Face causal language models as DeepSpeed pipelines."""

from ds_etp.pipeline.batches import pipeline_batch
from ds_etp.pipeline.build import from_causal_lm

__all__ = ["from_causal_lm", "pipeline_batch"]
