"""Every touch of transformers' internals."""
