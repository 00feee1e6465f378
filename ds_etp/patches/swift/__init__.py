"""Every touch of ms-swift's internals."""
