"""Experts modules: their layouts, the shards they become, and what is checked of them first."""
