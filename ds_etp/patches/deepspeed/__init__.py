"""Every touch of DeepSpeed's internals."""
