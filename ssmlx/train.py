"""`python -m ssmlx.train`: train streams, LoRA and pruning adapter with MLX."""

from .commands.train import main

if __name__ == "__main__":
    raise SystemExit(main())
