"""`python -m ssmlx.adapters`: the adapters that were made on this machine."""

from .commands.adapters import main

if __name__ == "__main__":
    raise SystemExit(main())
