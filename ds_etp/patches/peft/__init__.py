"""Every touch of PEFT's internals."""
