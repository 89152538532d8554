"""`python -m ssmlx.chat`: chat in the terminal."""

from .commands.chat import main

if __name__ == "__main__":
    raise SystemExit(main())
