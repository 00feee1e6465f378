"""Every touch of OpenRLHF's internals."""
