"""`python -m ssmlx.export`: export to Core ML or Core AI; the command is `convert.export`."""

from importlib import import_module


def main(argv: list[str] | None = None) -> int:
    # Beside this package in a checkout, inside it once installed.
    try:
        command = import_module("ssmlx.convert.export.__main__")
    except ModuleNotFoundError as error:
        if error.name != "ssmlx.convert":
            raise
        command = import_module("convert.export.__main__")
    exit_code: int = command.main(argv)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
