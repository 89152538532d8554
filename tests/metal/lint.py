"""What clang says of a generated Metal source; `include/lint.h` has the address spaces."""

from pathlib import Path

from .shim import INCLUDE, without_attributes

_OPTIONS = ("-x", "c++", "-std=c++17", "-nostdinc", "-Wall", "-Wextra", "-Wconversion")
_QUIET = ("-Wno-unknown-attributes", "-Wno-unused-parameter", "-Wno-ignored-attributes")


def complaints(source: str, folder: Path) -> list[str]:
    """Errors and warnings, with the source's line. Needs the package `libclang`."""
    from clang import cindex

    body, instance = without_attributes(source, r"\1static threadgroup \2 \3[\4];")
    path = folder / "kernel.metal.cpp"
    path.write_text(
        f'#include "{INCLUDE / "lint.h"}"\n#line 1 "kernel.metal"\n{body}\n'
        f"auto* instance = &{instance};\n"
    )
    options = [*_OPTIONS, *_QUIET, f"-isystem{INCLUDE}"]
    unit = cindex.Index.create().parse(str(path), args=options)
    return [str(found) for found in unit.diagnostics]
