"""The `expert_tensor_parallel` block, and what it needs of the rest of a DeepSpeed config. No torch."""
