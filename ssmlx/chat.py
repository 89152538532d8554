"""`python -m ssmlx.chat`: chat in the terminal."""

from .cli.chat import main

if __name__ == "__main__":
    raise SystemExit(main())
