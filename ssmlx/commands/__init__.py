"""The commands, and the options that they share; `--help` of none of them imports MLX."""
