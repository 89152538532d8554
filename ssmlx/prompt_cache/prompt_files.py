"""Prompts on disk: the keys and values of tokens, in a safetensors file that fits one model alone.

layers.N          [2, Hkv, L, Dh] keys and values of the tokens; or, if their shapes differ:
layers.N.keys     [1, H, L, Dh]
layers.N.values   [1, H, L, Dh]
metadata          format; what they were computed with, see `CacheKey.in_files`; token ids
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from ..errors import InputError, first_line, require
from ..loading.identity import CacheKey
from ..loading.tensors import check_tensors
from ..model.cache import TreeCache
from ..model.layer_state import Rows
from ..model.streams import StreamFusedModel
from ..prompts import common_prefix_length
from .unfinished_files import atomic_file, delete_unfinished_files

FORMAT = "ssmlx-prompt/2"
_KEPT = re.compile(r"[0-9a-f]{32}\.safetensors")
_MOST_TEXT = 2**24  # characters of token ids
_WHOLE = "a complete file written by `--prompt-cache`"
_DO = "delete it, or use another file"
_log = logging.getLogger("ssmlx")

Tokens = tuple[int, ...]
Run = Callable[[Callable[[], Any]], Any]
"""Calls what it is given, on the thread that runs MLX; the result."""


_FIELDS = fields(CacheKey)


@dataclass(frozen=True)
class PromptHeader:
    """The header of a prompt file."""

    key: CacheKey  # of the model whose keys and values it has
    tokens: Tokens  # ids of the prompt

    @classmethod
    def parse(cls, metadata: Mapping[str, str], path: Path) -> PromptHeader:
        found = f"{path} has the format {metadata.get('format')!r}"
        require(metadata.get("format") == FORMAT, found, expected=FORMAT, do=_DO)
        # More text than that is no prompt.
        text = metadata.get("tokens", "")[:_MOST_TEXT]
        try:
            tokens = tuple(int(one) for one in text.split(","))
        except ValueError:
            tokens = (-1,)
        found = f"{path} has invalid token ids"
        expected = "numbers from 0, separated by commas"
        require(min(tokens) >= 0 and len(text) < _MOST_TEXT, found, expected=expected, do=_DO)
        return cls(CacheKey(**{one.name: metadata.get(one.name, "") for one in _FIELDS}), tokens)


def read_header(path: Path) -> PromptHeader:
    """The header of a prompt file; its arrays are not read."""
    require(path.is_file(), f"{path} is not a file", expected=_WHOLE, do="check the path")
    try:
        with safe_open(path, framework="numpy") as file:
            return PromptHeader.parse(file.metadata() or {}, path)
    except (SafetensorError, OSError) as error:
        found = f"{path} cannot be read ({first_line(error)})"
        raise InputError(found, expected=_WHOLE, do=_DO) from error


def read_prompt(path: Path, model: StreamFusedModel) -> tuple[Tokens, TreeCache]:
    """The tokens of a prompt file, and a cache of them for `model` to go on from. MLX thread."""
    read_header(path)
    try:
        # All of one file, should another process replace it now.
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        header = PromptHeader.parse(metadata, path)
        tokens = header.tokens
        _require_fits(header, path, model)
        like = _rows_of_one_token(model)
        dtypes = {array.dtype for array in arrays.values()}
        found = f"{path} holds arrays of {' and '.join(sorted(map(str, dtypes)))}"
        dtype = like[0][0].dtype
        require(dtypes == {dtype}, found, expected=str(dtype), do=_DO)
        shapes = {
            name: (*array.shape[:2], len(tokens), array.shape[3])
            for name, array in _arrays_by_name(like).items()
        }
        check_tensors(arrays, shapes, path)
    except (RuntimeError, OSError) as error:
        found = f"{path} cannot be read ({first_line(error)})"
        raise InputError(found, expected=_WHOLE, do=_DO) from error
    rows = [tuple([arrays[name] for name in _array_names(n, own)]) for n, own in enumerate(like)]
    return tokens, TreeCache.of_rows(rows)


def _require_fits(header: PromptHeader, path: Path, model: StreamFusedModel) -> None:
    _require_same_key(CacheKey.in_files(model), header.key, path)
    count = len(header.tokens)
    limit = model.backbone.context_length
    size = model.backbone.vocab_size
    most = max(header.tokens)
    found = f"{path} has the token {most}"
    expected = f"tokens below {size}"
    require(most < size, found, expected=expected, do=_DO)
    found = f"{path} has {count} tokens"
    expected = f"at most the model's context of {limit}"
    require(limit is None or count <= limit, found, expected=expected, do=_DO)


def _require_same_key(key: CacheKey, found: CacheKey, path: Path) -> None:
    names = {
        "weights": "model's weights or settings",
        "lora": "adapter's LoRA",
        "computed_by": "version or machine",
    }
    for name, expected in asdict(key).items():
        value = getattr(found, name)
        what = f"{path} was made with a different {names.get(name, name)}, {value}"
        require(value == expected, what, expected=expected, do=_DO)


def _array_names(layer: int, rows: Rows) -> list[str]:
    """The names of a layer's arrays in a file: two if keys and values differ in shape."""
    name = f"layers.{layer}"
    return [name] if len(rows) == 1 else [f"{name}.keys", f"{name}.values"]


def _arrays_by_name(
    rows: Sequence[Rows],  # one or two arrays for each layer: keys and values together, or apart
) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for layer, own in enumerate(rows):
        found |= zip(_array_names(layer, own), own, strict=True)
    return found


def _rows_of_one_token(model: StreamFusedModel) -> list[Rows]:
    """Rows of one token by layer, uncomputed: for their shapes and dtypes."""
    cache = TreeCache(model.num_layers)
    model.backbone.append(mx.array([0]), cache)
    return cache.rows(1)


def write_prompt(
    path: Path,
    key: CacheKey,
    tokens: Tokens,
    cache: TreeCache,  # begins with `tokens`; not to be changed meanwhile
    run: Run,  # calls a function on the MLX thread
) -> None:
    """Write a prompt file, whole or not at all, that only its owner may read."""
    metadata = {"format": FORMAT, **asdict(key), "tokens": ",".join(map(str, tokens))}

    def save() -> None:
        mx.save_safetensors(file, _arrays_by_name(cache.rows(len(tokens))), metadata)

    with atomic_file(path, mode=0o600) as file:
        run(save)


def mark_used(path: Path) -> None:
    """Set a file's time to now, if possible."""
    with suppress(OSError):
        os.utime(path)


class PromptFolder:
    """Prompt files in a folder of at most `max_bytes`, of which the longest unused go first."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._headers: dict[tuple[str, int, int], PromptHeader | None] = {}

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """The prompt files written here, with their stats, the longest unused first."""
        found = []
        with suppress(OSError):
            for path in self.path.iterdir():
                with suppress(OSError):
                    if _KEPT.fullmatch(path.name) and path.is_file():
                        found.append((path, path.stat()))
        return sorted(found, key=lambda one: one[1].st_mtime_ns)

    def headers(self) -> list[tuple[Path, PromptHeader]]:
        """The files and their headers, the smallest first; damaged and older files are left out."""
        found: dict[tuple[str, int, int], PromptHeader | None] = {}
        left_out = []
        for path, stat in sorted(self.files(), key=lambda one: one[1].st_size):
            # A header, or that there is none, is remembered as long as its file seems the same.
            name = (path.name, stat.st_size, stat.st_ino)
            try:
                known = self._headers
                found[name] = known[name] if name in known else read_header(path)
            except InputError as error:
                found[name] = None
                left_out.append(error)
        self._headers = found
        if left_out:
            others = f" ({len(left_out) - 1} other files are skipped too)"
            _log.warning("%s%s", left_out[0], others if len(left_out) > 1 else "")
        return [(self.path / name[0], one) for name, one in found.items() if one is not None]

    def find_longest_match(self, key: CacheKey, tokens: Sequence[int]) -> tuple[Path | None, int]:
        """The file that shares most with the beginning of `tokens`, and how many of these."""
        best = None
        most = 0
        for path, header in self.headers():
            if header.key == key and (count := common_prefix_length(header.tokens, tokens)) > most:
                best = path
                most = count
        return best, most

    def save(self, key: CacheKey, tokens: Tokens, cache: TreeCache, run: Run) -> None:
        """Write a prompt as a file of the folder, unless a file begins with it already."""
        path, count = self.find_longest_match(key, tokens)
        if path is not None and count == len(tokens):
            mark_used(path)
            return
        size = len(tokens) * cache.row_bytes
        if size > self.max_bytes:
            return
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        delete_unfinished_files(self.path)
        self._make_room(size)
        name = sha256(repr((key, tokens)).encode()).hexdigest()[:32]
        target = self.path / f"{name}.safetensors"
        write_prompt(target, key, tokens, cache, run)
        # Files that the new one begins with say nothing more.
        for path, one in self.headers():
            if path != target and one.key == key and tokens[: len(one.tokens)] == one.tokens:
                path.unlink(missing_ok=True)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the longest unused files, until `num_bytes` more fit."""
        files = self.files()
        total = sum(stat.st_size for _, stat in files) + num_bytes
        for path, stat in files:
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size

    def delete_own_files(self) -> list[Path]:
        """The paths that were deleted; other files stay."""
        paths = [path for path, _ in self.files()]
        for path in paths:
            path.unlink(missing_ok=True)
        return [*paths, *delete_unfinished_files(self.path)]
