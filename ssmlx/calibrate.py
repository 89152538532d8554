"""`python -m ssmlx.calibrate`: measure this machine, and draft as is fastest on it."""

from .commands.calibrate import main

if __name__ == "__main__":
    raise SystemExit(main())
