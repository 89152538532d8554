"""`python -m ssmlx.upload`: an adapter and its card to the Hugging Face Hub."""

from .commands.upload import main

if __name__ == "__main__":
    raise SystemExit(main())
