"""Parallel sizes, process groups and collectives: nothing here knows of a model. `topology` needs no torch."""
