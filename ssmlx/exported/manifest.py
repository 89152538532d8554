"""What an exported package says of itself: `manifest.json` beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import InputError
from ..model.tree import Topology
from ..settings import read_json

FORMAT = "ssmlx-export/1"
MANIFEST, REPORT = "manifest.json", "report.json"
TARGETS = ("coreml", "coreai")
PACKAGES = {"coreml": "model.mlpackage", "coreai": "model.aimodel"}
_TABLES = ("slots", "depths", "paths")
_DO = "export it again with this version of ssmlx"


@dataclass(frozen=True)
class TreeTables:
    """The fixed part of the trees, so that a host in any language need not work it out.

    Attributes:
        topology: all nodes that there can be, breadth first.
        size: nodes of a tree, the likeliest of these where there are more.
    """

    topology: Topology
    size: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TreeTables:
        """The tables of a manifest."""
        slots, depths, paths = (mx.array(values[name], mx.int32) for name in _TABLES)
        topology = Topology(slots, depths, paths, values["num_candidates"], len(depths))
        return cls(topology, values["size"])

    def to_json(self) -> dict[str, Any]:
        """The tables as JSON values."""
        arrays = {name: getattr(self.topology, name).tolist() for name in _TABLES}
        return {**arrays, "num_candidates": self.topology.num_candidates, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a host needs to know of an exported model; all of it is in `manifest.json`.

    Attributes:
        target: "coreml" or "coreai".
        profile: "gpu" or "ane".
        dtype: of the floating inputs and outputs, "float32" or "float16".
        cache: "state", kept by the runtime; "arrays", inputs and outputs that the host carries.
        cache_names: names of the cache's tensors.
        cache_shape: of each of them.
        num_slots: S, tokens that the cache has room for.
        chunk: T, tokens of a prompt chunk.
        num_nodes: N, rows of a decode step.
        num_kept: M, nodes that pruning keeps.
        num_streams: G.
        tree: the trees that the streams draft.
        prompt_template: text with `{prompt}`, or None for the tokenizer's chat template.
        end_token_ids: tokens that end an answer.
        digest: SHA-256 of the package's files.
        compression: how the weights are stored.
        model, adapter: names of what was exported.
        versions: of the packages that made it.
    """

    target: str
    profile: str
    dtype: str
    cache: str
    cache_names: tuple[str, ...]
    cache_shape: tuple[int, ...]
    num_slots: int
    chunk: int
    num_nodes: int
    num_kept: int
    num_streams: int
    tree: TreeTables
    prompt_template: str | None
    end_token_ids: tuple[int, ...]
    digest: str
    compression: str
    model: str
    adapter: str
    versions: Mapping[str, str]

    @property
    def float_type(self) -> Any:
        """numpy's type of floating inputs."""
        return np.dtype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """The content of `manifest.json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, **values, "tree": self.tree.to_json()}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of an export's folder.

        Raises:
            InputError: it is missing, of another format, or lacks something.
        """
        path = folder / MANIFEST
        values = read_json(path, "the manifest of a model that `python -m ssmlx.export` wrote")
        if values.pop("format", None) != FORMAT:
            raise InputError(f"{path} is of another format", expected=FORMAT, do=_DO)
        names = {field.name for field in fields(cls)}
        if names != set(values):
            odd = ", ".join(sorted(names ^ set(values)))
            raise InputError(f"{path} lacks or has over: {odd}", expected=FORMAT, do=_DO)
        try:
            values["tree"] = TreeTables.from_json(values["tree"])
            for name in ("cache_names", "cache_shape", "end_token_ids"):
                values[name] = tuple(values[name])
            manifest = cls(**values)
            manifest.check()
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} cannot be read ({error})", expected=FORMAT, do=_DO) from error
        return manifest

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    def check(self) -> None:
        """Check that the numbers fit one another.

        Raises:
            InputError: they do not.
        """
        tree, count = self.tree.topology, min(self.tree.size, self.tree.topology.num_nodes)
        faults = {
            f"target {self.target!r}": self.target not in TARGETS,
            f"cache {self.cache!r}": self.cache not in ("state", "arrays"),
            f"dtype {self.dtype!r}": self.dtype not in ("float32", "float16"),
            f"trees of {count} nodes in steps of {self.num_nodes}": count != self.num_nodes,
            f"{self.num_kept} nodes kept of {self.num_nodes}": self.num_kept > self.num_nodes,
            f"{len(tree.slots)} edges for {len(tree.depths)} nodes": (
                len(tree.slots) + 1 != len(tree.depths) or len(tree.paths) != len(tree.depths)
            ),
            f"a tree deeper than {self.num_streams} streams": (
                np.array(tree.depths).max() > self.num_streams
            ),
        }
        for fault, found in faults.items():
            if found:
                raise InputError(f"the manifest has {fault}", expected="sizes that fit", do=_DO)

    def package(self, folder: Path) -> Path:
        """The package in an export's folder, its content checked against the digest.

        Raises:
            InputError: it is missing, or is not the one that this manifest was written for.
        """
        path = folder / PACKAGES[self.target]
        if not path.exists():
            raise InputError(f"{path} does not exist", expected="the exported package", do=_DO)
        if package_digest(path) != self.digest:
            raise InputError(
                f"{path} is not the package that {MANIFEST} was written for",
                expected="the two files of one export, unchanged",
                do="copy the whole folder again, or export again",
            )
        return path


def package_digest(package: Path) -> str:
    """SHA-256 over the names and contents of a package's files."""
    digest = hashlib.sha256()
    for path in sorted(file for file in package.rglob("*") if file.is_file()):
        digest.update(path.relative_to(package).as_posix().encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
