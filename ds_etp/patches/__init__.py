"""Every touch of host internals, each with the reason, the host release, and a way back."""
