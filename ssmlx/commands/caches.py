"""The caches command, and `--prompt-cache FILE` of others."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, require, unwritable_error
from ..loading.names import cache_dir
from .options import command, make_parser

if TYPE_CHECKING:
    from ..model.cache import TreeCache
    from ..model.streams import StreamFusedModel

PROG = "ssmlx.caches"
EPILOG = """examples:
  python -m ssmlx.caches
  python -m ssmlx.caches purge ~/Library/Caches/my-app/prompts

Prompts are kept by a `PromptCache` that has a folder. Files that others put there are left alone,
and so are those of --prompt-cache, which are yours to delete."""
_MIB = 2**20


class PromptFile:
    """The prompt of `--prompt-cache FILE`: read where the file is there, written at the end."""

    def __init__(self, path: Path | None) -> None:
        """Check what can be without a model. Without a path, nothing is read or kept."""
        self.path = path
        self.tokens: tuple[int, ...] = ()
        self.cache: TreeCache | None = None
        self._is_new = False
        if path is None:
            return
        if path.exists():
            from ..prompt_cache.files import read_header

            read_header(path)
        elif not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            raise unwritable_error(path, OSError("no such folder, or not yours"))

    def read(self, model: StreamFusedModel) -> None:
        from ..answers import run
        from ..model.cache_key import CacheKey
        from ..prompt_cache.files import read_prompt

        path = self.path
        if path is None:
            return
        model.backbone.capabilities.require("stages", "--prompt-cache")
        self._key = run(lambda: CacheKey.of(model))
        if path.exists():
            self.tokens, self.cache = run(lambda: read_prompt(path, model))

    def take(self, model: StreamFusedModel, tokens: Sequence[int]) -> tuple[TreeCache, int]:
        """As `PromptCache.take`, of this prompt alone."""
        from ..answers import run
        from ..prompts import common_prefix_length

        cache = self.cache
        count = common_prefix_length(self.tokens, tokens[:-1])
        if cache is None or count == 0:
            return model.make_cache(), 0
        return run(lambda: cache.fork(count)), count

    def keep(self, tokens: Sequence[int], cache: TreeCache) -> None:
        """Keep `tokens`, with which `cache` begins, unless what is kept begins with them."""
        from ..answers import run

        if self.path is not None and self.tokens[: len(tokens)] != tuple(tokens):
            self.tokens = tuple(tokens)
            self._is_new = True
            self.cache = run(lambda: cache.fork(len(tokens)))

    def write(self, model: StreamFusedModel) -> bool:
        """Write the file if it would change; not for a model with another adapter's LoRA."""
        from ..answers import run
        from ..loading.files import clear_leftovers
        from ..model.cache_key import CacheKey
        from ..prompt_cache.files import write_prompt

        path = self.path
        if path is None or self.cache is None or not self._is_new:
            return False
        key = run(lambda: CacheKey.of(model))
        if key != self._key:
            return False
        try:
            clear_leftovers(path.resolve().parent, path.name)
            write_prompt(path, key, self.tokens, self.cache, run)
        except OSError as error:
            raise unwritable_error(path, error) from error
        return True


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    text = "List the prompts that are kept on disk, or delete them."
    parser = make_parser(PROG, text, EPILOG, "[list | purge] [FOLDER]")
    parser.add_argument("act", nargs="?", choices=("list", "purge"), default="list")
    parser.add_argument("folder", nargs="?", type=Path, help=f"(default: {_default_folder()})")
    return parser.parse_args(argv)


def _default_folder() -> Path:
    return cache_dir() / "prompts"


def _main(args: argparse.Namespace) -> None:
    from ..prompt_cache.files import PromptFolder, read_header

    path = args.folder or _default_folder()
    found = f"{path} is no folder"
    expected = "the folder of a `PromptCache`"
    require(args.folder is None or path.is_dir(), found, expected=expected, do="check the path")
    # A server with keys has a folder for each in it.
    inner = sorted(one for one in path.glob("*") if re.fullmatch("[0-9a-f]{16}", one.name))
    folders = [PromptFolder(one, 0) for one in (path, *inner)]
    files = [file for folder in folders for file in folder.files()]
    total = f"{len(files)} prompts, {sum(stat.st_size for _, stat in files) / _MIB:.1f} MiB"
    if args.act == "purge":
        try:
            for folder in folders:
                folder.purge()
        except OSError as error:
            raise unwritable_error(path, error) from error
        print(f"deleted from {path}: {total}")
        return
    for file, stat in reversed(files):
        try:
            header = read_header(file)
            key = header.key
            count = len(header.tokens)
            about = f"{count} tokens of {key.model}, {key.dtype}, LoRA {key.lora[:8]}"
        except InputError:
            about = "damaged"
        used = datetime.fromtimestamp(stat.st_mtime).isoformat(" ", "minutes")
        print(f"{file.relative_to(path)}  {stat.st_size / _MIB:8.1f} MiB  {used}  {about}")
    print(f"in {path}: {total}")


main = command(PROG, parse_args, _main)
