"""Checkpoints that any layout of the same model can load: chunks of logical tensors in safetensors, and one index."""
