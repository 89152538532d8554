"""Write docs/reference.md from the docstrings of `ssmlx.__all__`: `python docs/build.py`."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import ssmlx

PAGE = Path(__file__).with_name("reference.md")
INTRODUCTION = """# Python reference

These are the names that `import ssmlx` gives. They are stable; everything else may change with any
version. `python docs/build.py` writes this page from their docstrings.
"""
GROUPS = {
    "Load a model": (
        "load", "swap_adapter", "bundled_adapters", "load_draft_model", "load_heads", "load_mtp",
        "DraftModel",
    ),
    "Answers": (
        "stream_generate", "generate", "prompt_tokens", "chat_tokens", "Answer",
        "GenerationResponse", "TokenLogprobs", "EarlierAnswers",
    ),
    "Apps and conversations": ("Engine", "ChatSession", "PromptCache"),
    "Settings": (
        "GenerateConfig", "TreeConfig", "PruneConfig", "PromptLookupConfig", "LookaheadConfig",
        "DraftModelConfig", "MtpConfig", "SpeculatorTreeConfig", "AcceptanceConfig",
    ),
    "Errors": ("InputError", "NoRoomError"),
}  # fmt: skip
WIDTH = 120


def page() -> str:
    """The whole page; ValueError if `GROUPS` and `ssmlx.__all__` have different names."""
    listed = [name for names in GROUPS.values() for name in names]
    if sorted([*listed, "__version__"]) != sorted(ssmlx.__all__):
        raise ValueError(f"GROUPS has other names than __all__: {set(listed) ^ set(ssmlx.__all__)}")
    contents = [
        f"| {title} | {' '.join(f'[`{name}`](#{name.lower()})' for name in names)} |"
        for title, names in GROUPS.items()
    ]
    parts = [INTRODUCTION, "| | |\n|---|---|\n" + "\n".join(contents)]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names:
            # Not by `getattr`: it may find a command's module of the same name.
            parts += describe(name, ssmlx.__getattr__(name))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def describe(name: str, value: Any) -> Iterator[str]:
    """The Markdown of a public name: heading, signature, docstring, properties and methods."""
    yield f"### `{name}`"
    if not inspect.isclass(value):
        yield signature(value)
        yield from docstring(value)
        return
    if is_dataclass(value):
        yield from dataclass_docstring(value)
    else:
        if "__init__" in vars(value):
            yield signature(value.__init__, name)
        yield from docstring(value)
    members = [
        (key, member)
        for key, member in vars(value).items()
        if not key.startswith("_") and inspect.getdoc(member) and not inspect.isclass(member)
    ]
    properties = [(key, member) for key, member in members if isinstance(member, property)]
    if properties:
        yield "Properties:"
        yield "\n".join(bullet(f"`{key}`", in_a_line(one)) for key, one in properties)
    for key, member in members:
        if inspect.isroutine(member):
            yield f"#### `{name}.{key}`"
            yield signature(member)
            yield from docstring(member)


def signature(function: Any, called: str = "") -> str:
    """A function's head as its source has it; `called` replaces `__init__` by the class's name."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    text = "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]).rstrip(":")
    text = text.replace("def ", "", 1)
    text = re.sub(r"(?<=\()(\s*)self(?:,\s*|(?=\)))", r"\1", text)
    for constant in re.findall(r"= ([A-Z_]+)\b", text):
        value = inspect.unwrap(function).__globals__[constant]
        text = text.replace(f"= {constant}", f"= {quoted(value)}")
    if called:
        text = text.replace("__init__", called, 1).removesuffix(" -> None")
    return f"```python\n{text}\n```"


def quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def dataclass_docstring(value: type) -> Iterator[str]:
    """The docstring of a dataclass, with its fields' types and defaults, inherited ones too."""
    described = {one.name: field_text(value, one) for one in fields(value)}
    for one in value.__mro__:
        parts = list(docstring(one, described)) if is_dataclass(one) else []
        if one is value or "Attributes:" in parts:
            yield from parts if one is value else [f"Of `{one.__name__}`: {parts[0]}", *parts[1:]]


def field_text(owner: type, one: Field[Any]) -> str:
    """A field as its class has it: name, type and default."""
    default = "" if one.default is MISSING else f" = {quoted(one.default)}"
    if one.default_factory is not MISSING:
        default = f" = {one.default_factory.__name__}()"
    for base in filter(is_dataclass, owner.__mro__):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == one.name:
                return f"{one.name}: {ast.unparse(node.annotation)}{default}"
    raise ValueError(f"{owner.__name__} has no annotation of {one.name}")


def docstring(
    value: object,
    described: dict[str, str] | None = None,  # names of its lists, with more than the name
) -> Iterator[str]:
    """A docstring's parts as Markdown: paragraphs, code, and the lists of its sections."""
    text = inspect.getdoc(value) or ""
    for part in re.split(r"\n\n(?=\S)|\n\n(?=    )", text):
        title, _, rest = part.partition("\n")
        if title == "Returns:":
            yield filled(f"Returns: {' '.join(rest.split())}")
        elif title in ("Args:", "Attributes:", "Raises:"):
            yield title
            items = re.split(r"\n(?! )", textwrap.dedent(rest))
            yield "\n".join(item(one, described or {}) for one in items)
        elif part.startswith("    "):
            yield f"```python\n{textwrap.dedent(part)}\n```"
        else:
            yield filled(part)


def in_a_line(value: object) -> str:
    return " ".join(docstring(value)).replace("Raises: - ", "Raises ")


def item(text: str, described: dict[str, str]) -> str:
    names, _, said = text.partition(": ")
    return bullet(", ".join(f"`{described.get(name, name)}`" for name in names.split(", ")), said)


def bullet(term: str, text: str) -> str:
    return filled(f"- {term}: {' '.join(text.split())}", indent="  ")


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
