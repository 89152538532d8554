"""The API reference: every public name and argument is described, and the pages are built."""

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
    """The script that builds the pages, as a module."""
    pytest.importorskip("pdoc")
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(builder, tmp_path_factory):
    """The built pages, by name."""
    folder = tmp_path_factory.mktemp("site")
    builder.build(folder)
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def test_the_pages_have_what_they_are_for(site):
    api = site["ssmlx.html"]
    assert [name for name in NAMES if f'id="{name}"' not in api] == []
    assert "ssmlx.Engine" in re.sub(r"<[^>]+>", "", site["index.html"])
    for page, text in (
        ("index.html", "prompt_tokens"),
        ("server.html", "/v1/chat/completions"),
        ("adapters.html", "streams_config.json"),
        ("ssmlx.html", "max_tokens"),
    ):
        assert text in site[page], page


def test_the_pages_lead_to_each_other(site):
    for name, page in site.items():
        links = re.findall(r'href="([^"#:]+\.html)', page)
        assert [link for link in links if link not in site] == [], name
        assert {"ssmlx.html", "server.html"} <= {*links, name}


def test_a_warning_of_the_tool_is_an_error(builder, monkeypatch, tmp_path):
    monkeypatch.setitem(ssmlx.swap_adapter.__annotations__, "model", "NoSuchClass")
    with pytest.raises(UserWarning, match="NoSuchClass"):
        builder.build(tmp_path)


def test_a_link_that_leads_nowhere_is_an_error(builder):
    address = "https://example.com"
    assert builder.with_absolute_links("[a](perf/README.md#b)", "", address) == (
        "[a](https://example.com/blob/main/perf/README.md#b)"
    )
    with pytest.raises(FileNotFoundError):
        builder.with_absolute_links("[a](nowhere.md)", "docs", address)
