"""What a run shows of its routers: counted in training, written by DeepSpeed's monitor, read back for a report."""
