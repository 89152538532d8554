"""`python -m ssmlx.check`: what a model can do on this machine."""

from .commands.check import main

if __name__ == "__main__":
    raise SystemExit(main())
