"""Deferred loading: a rank reads from safetensors only its shard of the experts."""
