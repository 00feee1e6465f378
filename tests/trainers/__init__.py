"""Other projects' trainers under ds_etp, by their own commands. `make trainers` runs them; pytest doesn't."""
