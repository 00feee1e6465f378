"""The command `ds-etp`: `topology`, `plan`, `check`, `export`. A subcommand imports what it needs when it runs."""
