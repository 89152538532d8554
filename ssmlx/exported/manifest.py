"""The manifest of an exported package: `manifest.json` beside it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import InputError, require
from ..json_files import from_json, read_json
from ..settings import MAX_DRAFT_TOKENS, MAX_SIZE, TreeConfig

FORMAT = "ssmlx-export/2"
FORMATS = (FORMAT, "ssmlx-export/1")  # format 1 also lists all nodes that there can be
MANIFEST = "manifest.json"
REPORT = "report.json"
PACKAGES = {"coreml": "model.mlpackage", "coreai": "model.aimodel"}
_DO = "export it again with this version of ssmlx"


@dataclass(frozen=True)
class TreeShape:
    """The size of draft trees, and the rule by which they grow from the candidates of "decode"."""

    num_candidates: int  # K, of each stream
    size: int  # nodes of a tree, the likeliest
    width: int | None = None  # children of a node, its likeliest; None for all K
    is_conditional: bool = False  # whether candidates are scored given the token before them

    @property
    def config(self) -> TreeConfig:
        """The same as settings of `grow_tree`."""
        return TreeConfig(width=self.width or self.num_candidates, size=self.size)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a host needs to know of an exported model: the content of `manifest.json`."""

    target: str  # "coreml" or "coreai"; `profile` is "gpu" or "ane"
    profile: str
    dtype: str  # of the floating inputs and outputs, "float32" or "float16"
    cache: str  # "state", kept by the runtime; "arrays", inputs and outputs that the host carries
    # cache_names and cache_shape: names of the cache's tensors, and the shape of each
    cache_names: tuple[str, ...]
    cache_shape: tuple[int, ...]
    num_slots: int  # S, tokens that the cache has room for
    chunk: int  # T, tokens of a prompt chunk
    num_nodes: int  # N, rows of a decode step
    num_kept: int  # M, nodes that pruning keeps
    num_streams: int  # G
    tree: TreeShape
    prompt_template: str | None  # text with `{prompt}`, or None for the tokenizer's chat template
    end_token_ids: tuple[int, ...] = ()  # tokens that end an answer
    digest: str = ""  # SHA-256 of the package's files
    compression: str = "none"
    model: str = ""
    adapter: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # of the packages that made it

    @property
    def float_type(self) -> Any:
        """The NumPy type of floating inputs and outputs."""
        return np.dtype(self.dtype)

    def empty_cache(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(self.cache_shape, self.float_type) for name in self.cache_names}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The package beside it is not looked at."""
        path = folder / MANIFEST
        values = read_json(path, "the manifest of a model that `python -m ssmlx.export` wrote")
        found = values.pop("format", None)
        require(found in FORMATS, f"{path} has another format", expected=FORMAT, do=_DO)
        odd = ", ".join(sorted({one.name for one in fields(cls)} ^ set(values)))
        require(not odd, f"{path} has missing or unknown fields: {odd}", expected=FORMAT, do=_DO)
        try:
            manifest: Self = from_json(cls, values)
            faults = manifest._possible_faults()
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error})", expected=FORMAT, do=_DO) from error
        for fault, is_there in faults.items():
            require(not is_there, f"{path} has {fault}", expected="sizes that fit", do=_DO)
        return manifest

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    def _possible_faults(self) -> dict[str, bool]:
        """Faults, as a message names them, and whether the values have them. Values of other types
        may raise TypeError and the like."""
        tree = self.tree.config
        slots = self.num_slots
        shape = self.cache_shape
        return {
            f"profile {self.profile!r}": self.profile not in ("gpu", "ane"),
            f"target {self.target!r}": self.target not in PACKAGES,
            f"cache {self.cache!r}": self.cache not in ("state", "arrays"),
            f"dtype {self.dtype!r}": self.dtype not in ("float32", "float16"),
            f"trees of {tree.size} nodes in steps of {self.num_nodes}": tree.size != self.num_nodes,
            f"{self.num_kept} nodes kept of {tree.size}": not 1 <= self.num_kept <= tree.size,
            f"{tree.size} nodes in {slots} slots": tree.size > slots,
            f"chunks of {self.chunk} in {slots} slots": self.chunk < 1 or slots % self.chunk > 0,
            f"caches of {list(shape)} for {slots} slots": (
                slots not in shape or min(shape) < 1 or prod(shape) > 2**30
            ),
            f"{self.tree.num_candidates} candidates": self.tree.num_candidates > MAX_SIZE,
            f"{tree.width} children of {self.tree.num_candidates} candidates": (
                tree.width != min(tree.width or 0, self.tree.num_candidates)
            ),
            f"{self.num_streams} streams": not 1 <= self.num_streams <= MAX_DRAFT_TOKENS,
        }

    def unchanged_package(self, folder: Path) -> Path:
        """The package, whose files are read and compared with `digest`."""
        path = folder / PACKAGES[self.target]
        require(path.exists(), f"{path} does not exist", expected="the exported package", do=_DO)
        require(
            package_digest(path) == self.digest,
            f"{path} is not the package that {MANIFEST} was written for",
            expected="the two files of one export, unchanged",
            do="copy the whole folder again, or export again",
        )
        return path


def package_digest(package: Path) -> str:
    """SHA-256 over the relative paths and contents of all files, in the order of these paths."""
    digest = hashlib.sha256()
    for path in sorted(file for file in package.rglob("*") if file.is_file()):
        digest.update(path.relative_to(package).as_posix().encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
