"""Build the API reference, static pages that need no server.

python docs/build.py            # into docs/site
python docs/build.py FOLDER

pdoc renders the docstrings of `ssmlx.__all__`; the other pages are Markdown of this repository.
Every warning is an error.
"""

import inspect
import re
import sys
import tomllib
import warnings
from pathlib import Path

from pdoc import doc, render

import ssmlx
from ssmlx.loading import adapter

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = {
    "index.html": "Guide",
    "ssmlx.html": "Python API",
    "server.html": "Server",
    "adapters.html": "Adapter format",
    "questions.html": "Questions",
}
# sections of the README that the first page has
GUIDE = ("Use it", "In an app", "For editors, agents and chat pages", "Your own model")


def readme_sections() -> str:
    """Select the README's title and the sections of `GUIDE`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    return "# ssmlx\n\n" + "".join(f"## {title}\n{sections[title]}" for title in GUIDE)


def with_absolute_links(
    text: str,
    folder: str,  # of the text, relative to the repository's root
    repository: str,  # its address
) -> str:
    """Make relative links lead to the repository; FileNotFoundError if one leads to no file."""

    def absolute(match: re.Match[str]) -> str:
        path = (ROOT / folder / match[1]).resolve(strict=True).relative_to(ROOT)
        return f"]({repository}/blob/main/{path.as_posix()}{match[2]})"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", absolute, text)


def pages() -> dict[str, str]:
    """Collect the Markdown of every page but the API's, by file name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    described = inspect.cleandoc(adapter.__doc__ or "")
    sources = {
        "index.html": (readme_sections(), ""),
        "server.html": ((ROOT / "ssmlx/server/README.md").read_text("utf-8"), "ssmlx/server"),
        "adapters.html": (f"# Adapter format\n\n{described}", "ssmlx/loading"),
        "questions.html": ((HERE / "questions.md").read_text("utf-8"), "docs"),
    }
    return {
        file: with_absolute_links(text, folder, repository)
        for file, (text, folder) in sources.items()
    }


def build(folder: Path) -> None:
    for name in ssmlx.__all__:
        if name != "__version__":
            # Loaded on first use, and pdoc reads what is loaded; and not a command's module of the
            # same name, which an import of `ssmlx.generate` puts there.
            ssmlx.__getattr__(name)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render.configure(
            docformat="google",
            include_undocumented=False,
            search=False,
            show_source=False,
            template_directory=HERE / "templates",
        )
        render.env.globals["pages"] = PAGES
        api = doc.Module(ssmlx)
        (folder / "ssmlx.html").write_text(render.html_module(api, {"ssmlx": api}), "utf-8")
        template = render.env.get_template("page.html.jinja2")
        for file, text in pages().items():
            page = template.render(title=PAGES[file], text=text, all_modules={})
            (folder / file).write_text(page, "utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "site")
