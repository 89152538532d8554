"""The API reference: every public name and argument is described, and docs/reference.md has it."""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
from real import ROOT

import ssmlx

NAMES = [name for name in ssmlx.__all__ if name != "__version__"]


def described(text: str) -> set[str]:
    """The names that a docstring describes: in a list of a section, or `quoted` in a sentence."""
    listed = re.findall(r"(?m)^ +((?:\w+, )*\w+): ", text)
    return {name for row in listed for name in row.split(", ")} | set(re.findall(r"`(\w+)`", text))


def functions_of(value: object) -> Iterator[tuple[str, object]]:
    """A function itself, or the public methods of a class that its own package defines."""
    if not inspect.isclass(value):
        yield "", value
        return
    for name, member in inspect.getmembers(value, inspect.isroutine):
        own = getattr(member, "__module__", "") or ""
        if not name.startswith("_") and own.startswith("ssmlx"):
            yield f".{name}", member


def undocumented(name: str) -> Iterator[str]:
    """What of a public name has no description: itself, a method, a field or an argument."""
    # Not a command's module of the same name, which other tests import.
    value = ssmlx.__getattr__(name)
    text = inspect.getdoc(value) or ""
    if not text:
        yield name
    if inspect.isclass(value):
        parts = constructed_by(value)
        whole = "\n".join([text, *parts.values()])
        yield from (f"{name}({part})" for part in parts if part not in described(whole))
    for suffix, function in functions_of(value):
        own = inspect.getdoc(function) or ""
        if not own:
            yield name + suffix
        missing = [one for one in arguments(function) if one not in described(own)]
        yield from (f"{name}{suffix}({one})" for one in missing)


def constructed_by(value: type) -> dict[str, str]:
    """What a class is made of, each with a docstring that may describe it beside the class's."""
    if is_dataclass(value):
        inherited = "\n".join(inspect.getdoc(one) or "" for one in value.__mro__[:-1])
        return {one.name: inherited for one in fields(value)}
    if "__init__" in vars(value):
        own = inspect.getdoc(value.__init__) or ""
        return dict.fromkeys(arguments(value.__init__), own)
    return {}


def arguments(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_argument_is_described(name):
    assert list(undocumented(name)) == []


def test_a_missing_description_is_found():
    class Part:
        """A part.

        Args:
            size: how large.
        """

        def __init__(self, size: int, colour: str) -> None: ...

        def turn(self, angle: float) -> None:
            """Turn it."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssmlx, "__getattr__", {"Part": Part}.__getitem__)
        patch.setattr(Part.turn, "__module__", "ssmlx.part")
        assert list(undocumented("Part")) == ["Part(colour)", "Part.turn(angle)"]


@pytest.fixture(scope="module")
def builder():
    """The script that writes the page, as a module."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_docstrings(builder):
    written = builder.PAGE.read_text("utf-8")
    assert written == builder.page(), "run `python docs/build.py`"
    titles = re.findall(r"(?m)^### `(\w+)`$", written)
    assert sorted(titles) == sorted(NAMES)


def test_a_name_in_no_group_is_an_error(builder, monkeypatch):
    monkeypatch.setattr(ssmlx, "__all__", [*ssmlx.__all__, "brand_new"])
    with pytest.raises(ValueError, match="brand_new"):
        builder.page()


def test_docstrings_become_markdown(builder):
    def turn(angle: float, speed: int = 1) -> None:
        """Turn it.

            turn(90)

        Args:
            angle: in degrees,
                not in radians.
            speed: how fast.
        """

    assert builder.signature(turn) == "```python\nturn(angle: float, speed: int = 1) -> None\n```"
    assert list(builder.docstring(turn)) == [
        "Turn it.",
        "```python\nturn(90)\n```",
        "Args:",
        "- `angle`: in degrees, not in radians.\n- `speed`: how fast.",
    ]
