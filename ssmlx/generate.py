"""`python -m ssmlx.generate`: answer prompts from the command line.

The function `ssmlx.generate` is `ssmlx.api.generate`. It keeps that name when this module is
imported.
"""

from .commands.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
