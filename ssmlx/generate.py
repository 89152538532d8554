"""`python -m ssmlx.generate`: answer prompts from the command line."""

from .commands.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
