"""`python -m ssmlx.caches`: the prompts that are kept on disk."""

from .commands.caches import main

if __name__ == "__main__":
    raise SystemExit(main())
