"""`python -m ssmlx.adapt`: make a model on this machine draft for itself."""

from .commands.adapt import main

if __name__ == "__main__":
    raise SystemExit(main())
