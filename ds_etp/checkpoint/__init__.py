"""Checkpoints that any layout of the same model can load: boxes of logical tensors, one index."""
