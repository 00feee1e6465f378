"""Every touch of TRL's internals."""
