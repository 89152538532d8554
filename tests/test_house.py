"""The rule of the rooms, held: imports go down only, and in no circle.

`python tests/test_house.py` prints the tree with its lines, and every import that breaks the rule.
"""

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from os.path import commonpath, relpath
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = (".py", ".js", ".html", ".metal", ".swift", ".c", ".h")
# From the top down; an import goes to a later word or line, or stays on its own.
BUILDINGS = ["examples", "perf", "convert", "ssmlx"]
ROOMS = [
    "chat generate adapt adapters train upload export caches check server",
    "commands",
    "engine",
    "training",
    "api session exported",
    "prompt_cache",
    "generation",
    "drafters",
    "policy",
    "decoding",
    "loading",
    "model",
    "prompts",
    "rendering",
    "formats",
    "pairs",
    "settings templates turns",
    "errors json_files blas answers mlx_thread bars report detokenizer __init__",
]
EXCEPTIONS = {
    ("ssmlx/export.py", "convert/export"),  # the command's stub; the PyTorch side does it
    ("ssmlx/exported/__main__.py", "ssmlx/commands"),  # a command, beside what it runs
}


@cache
def lines() -> dict[str, int]:
    """Lines of every tracked file of code, by its path from the root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [p for p in listed.stdout.split() if p.endswith(CODE) and (ROOT / p).exists()]
    return {path: (ROOT / path).read_text().count("\n") for path in paths}


@cache
def modules() -> dict[str, str]:
    """The file of every module outside tests, by its dotted name."""
    found = [p for p in lines() if p.endswith(".py") and p.split("/")[0] in BUILDINGS]
    return {p[:-3].replace("/", ".").removesuffix(".__init__"): p for p in found}


@cache
def homes() -> dict[str, str]:
    """Where each public name of `ssmlx` lives: to import it from `ssmlx` is to import its home."""
    for node in ast.parse((ROOT / "ssmlx/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES":
            table = ast.literal_eval(node.value).items()
            return {f"ssmlx.{name}": f"ssmlx.{home}" for home, names in table for name in names}
    raise AssertionError("ssmlx/__init__.py has no table of its lazy names")


def named(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules that an import statement of `module` names, where they are ours."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules())
        return
    package = modules()[module].endswith("__init__.py") - node.level
    above = module.split(".")[: package or None] if node.level else []
    origin = ".".join(above + ([node.module] if node.module else []))
    for full in (f"{origin}.{alias.name}" for alias in node.names):
        places = (homes().get(full, full), origin)
        yield from [place for place in places if place in modules()][:1]


@cache
def arrows() -> list[tuple[str, str]]:
    """(importing file, imported file), once each: wherever in the file the import stands."""
    found = set()
    for module, path in modules().items():
        tree = ast.parse((ROOT / path).read_text())
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        # The lazy table's other half, which only type checkers read.
        kept = [n for n in imports if path != "ssmlx/__init__.py" or n.col_offset == 0]
        found |= {(path, modules()[name]) for node in kept for name in named(module, node)}
    return sorted((a, b) for a, b in found if a != b and (a, str(Path(b).parent)) not in EXCEPTIONS)


def level(path: str) -> tuple[int, ...]:
    """How far down a file stands; the order of rooms is that of `ssmlx` alone."""
    building, room = path.split("/")[:2]
    floor = [n for n, names in enumerate(ROOMS) if room.removesuffix(".py") in names.split()]
    assert floor or building != "ssmlx", f"ssmlx/{room} stands in no line of ROOMS"
    return BUILDINGS.index(building), *(floor if building == "ssmlx" else [])


def upward() -> list[str]:
    return [f"{a} -> {b}" for a, b in arrows() if level(a) > level(b)]


def circles() -> Iterator[str]:
    """One circle of each folder that has any, among the files and folders right in it."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for ends in arrows():
        folder = commonpath(ends)
        a, b = (relpath(end, folder or ".").split("/")[0] for end in ends)
        graphs.setdefault(folder, {}).setdefault(a, set()).add(b)
    for folder, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"{folder or '.'}: " + " -> ".join(reversed(error.args[1]))


def sizes() -> tuple[int, int, int]:
    """Rooms that one sees in `ssmlx/`, data among them; lines outside tests, and in them."""
    seen = {path.split("/")[1] for path in lines() if path.startswith("ssmlx/")} | {"adapters"}
    in_tests = sum(count for path, count in lines().items() if path.startswith("tests/"))
    return len(seen - {"__init__.py"}), sum(lines().values()) - in_tests, in_tests


def test_imports_go_down_only():
    assert upward() == []


def test_no_imports_go_in_a_circle():
    assert list(circles()) == []


SPEAKING = (
    "ssmlx/commands/", "ssmlx/exported/__main__.py", "ssmlx/server/__main__.py",
    "convert/", "perf/", "examples/",
)  # fmt: skip
LOUD = {"print", "input", "breakpoint", "exit", "quit"}  # calls
RUDE = {"signal", "subprocess", "multiprocessing", "pdb", "warnings"}  # modules
STREAMS = {"stdin", "stdout", "stderr", "__stdout__", "__stderr__"}  # of `sys`


def loud(path: str) -> Iterator[str]:
    """What a file does to its process: prints, asks, starts another, changes its environment."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        found = ""
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in LOUD:
                found = name
            case ast.Import(names=names) if any(n.name.split(".")[0] in RUDE for n in names):
                found = ast.unparse(node)
            case ast.ImportFrom(module=str(name), level=0) if name.split(".")[0] in RUDE:
                found = ast.unparse(node)
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name in STREAMS:
                found = f"sys.{name}"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in (
                "system",
                "popen",
                "fork",
                "putenv",
                "unsetenv",
                "kill",
                "_exit",
            ) or name.startswith(("exec", "spawn", "posix_spawn")):
                found = f"os.{name}"
            case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Store() | ast.Del()):
                found = ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr=name)):
                found = "" if name == "get" else ast.unparse(node)
        if found:
            yield f"{path}:{node.lineno} {found}"


def test_the_library_is_quiet():
    """It logs, raises and reports through callbacks; commands print. `generate(verbose=True)`
    does so because it is asked to."""
    library = [p for p in modules().values() if not p.startswith(SPEAKING)]
    found = [one for path in library for one in loud(path)]
    assert len(library) > 60 and {one.split(":")[0] for one in found} == {"ssmlx/api.py"}, found
    assert any(one for path in modules().values() for one in loud(path) if "subprocess" in one)


if __name__ == "__main__":
    total: Counter[str] = Counter()
    for path, count in lines().items():
        for part in [path, *map(str, Path(path).parents)]:
            total[part] += count
    for path in sorted(total):
        print(f"{total[path]:7,}  {'  ' * path.count('/')}{Path(path).name or '.'}")
    print("{} rooms, {:,} lines outside tests, {:,} in tests".format(*sizes()))
    print(f"{len(arrows())} arrows, {len(upward())} upward", *upward(), *circles(), sep="\n")
