"""The caches command, and `--prompt-cache FILE` of others."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, one_line, require, unwritable_error
from .parser import add_yes_option, make_parser
from .running import confirmed, make_main

if TYPE_CHECKING:
    from ..model.streams import StreamFusedModel
    from ..model.text_cache import TextCache

PROG = "ssmlx.caches"
EPILOG = """examples:
  python -m ssmlx.caches ~/.cache/prompts
  python -m ssmlx.caches purge ~/Library/Caches/my-app/prompts

FOLDER is that of a `PromptCache`, or of a server's --prompt-cache. purge deletes their files and no
others. It asks first; without a terminal to ask on, it needs --yes. The file of a chat's
--prompt-cache is not listed: delete it yourself."""
_MIB = 2**20


class PromptFile:
    """The processed prompt of `--prompt-cache FILE`, with which prompts may begin: `load` reads it
    from the file, `save` writes it if it has changed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path  # None: nothing is read or kept
        self.tokens: tuple[int, ...] = ()
        self.cache: TextCache | None = None
        self._is_new = False
        if path is None:
            return
        if path.exists():
            from ..prompt_cache.prompt_files import read_header

            read_header(path)
        elif not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            raise unwritable_error(path, OSError("no such folder, or not yours"))

    def load(self, model: StreamFusedModel) -> None:
        """Read the file. The model's weights are read too, unless they were before, see
        `stored_weights_digest`."""
        from ..loading.identity import CacheKey
        from ..mlx_thread import run_on_mlx_thread
        from ..prompt_cache.prompt_files import read_prompt

        path = self.path
        if path is None:
            return
        model.backbone.capabilities.require("stages", "--prompt-cache")
        self._key = CacheKey.in_files(model)
        if path.exists():
            self.tokens, self.cache = run_on_mlx_thread(lambda: read_prompt(path, model))

    def fork(self, model: StreamFusedModel, tokens: Sequence[int]) -> tuple[TextCache, int]:
        """(cache, tokens): a cache of the answer's own that holds what the prompt has in common
        with the kept one, but never its last token, and how many tokens these are."""
        from ..mlx_thread import run_on_mlx_thread
        from ..prompts import common_prefix_length

        cache = self.cache
        count = common_prefix_length(self.tokens, tokens[:-1])
        if cache is None or count == 0:
            return model.make_cache(), 0
        return run_on_mlx_thread(lambda: cache.fork(count)), count

    def keep(
        self,
        tokens: Sequence[int],
        cache: TextCache,  # its first rows hold these tokens; it may hold more
    ) -> None:
        """Replace the kept prompt, unless it begins with these tokens."""
        from ..mlx_thread import run_on_mlx_thread

        if self.path is not None and self.tokens[: len(tokens)] != tuple(tokens):
            self.tokens = tuple(tokens)
            self._is_new = True
            self.cache = run_on_mlx_thread(lambda: cache.fork(len(tokens)))

    def save(self, model: StreamFusedModel) -> bool:
        """Write the kept prompt; False if it is not written, as with another LoRA than `load` saw,
        or from a kind of cache that has no file."""
        from ..loading.identity import CacheKey
        from ..mlx_thread import run_on_mlx_thread
        from ..model.cache import TreeCache
        from ..prompt_cache.prompt_files import write_prompt
        from ..prompt_cache.unfinished_files import delete_unfinished_files

        path = self.path
        cache = self.cache
        if path is None or not isinstance(cache, TreeCache) or not self._is_new:
            return False
        key = CacheKey.in_files(model)
        if key != self._key:
            return False
        try:
            delete_unfinished_files(path.resolve().parent, path.name)
            write_prompt(path, key, self.tokens, cache, run_on_mlx_thread)
        except OSError as error:
            raise unwritable_error(path, error) from error
        return True


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    text = "List or delete the processed prompts that are kept on disk."
    parser = make_parser(PROG, text, EPILOG, "[list | purge] FOLDER [--yes]")
    parser.add_argument(
        "act", nargs="?", choices=("list", "purge"), default="list", help="(default: list)"
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of a PromptCache")
    add_yes_option(parser)
    return parser.parse_intermixed_args(argv)


def _list_or_purge(args: argparse.Namespace) -> int:
    """List the files or delete them; the exit code is 1 if the user does not confirm. A server's
    folders for its keys are included."""
    from ..prompt_cache.prompt_files import PromptFolder, read_header

    path: Path = args.folder
    expected = "the folder of a `PromptCache`"
    require(path.is_dir(), f"{path} is not a folder", expected=expected, do="check the path")
    # A server with keys has a folder for each in it.
    inner = sorted(one for one in path.glob("*") if re.fullmatch("[0-9a-f]{16}", one.name))
    folders = [PromptFolder(one, 0) for one in (path, *inner)]
    files = [file for folder in folders for file in folder.files()]
    total = f"{len(files)} prompts, {sum(stat.st_size for _, stat in files) / _MIB:.1f} MiB"
    if args.act == "purge":
        if not confirmed(f"delete {total}, from {path}", args):
            return 1
        try:
            for folder in folders:
                folder.delete_own_files()
        except OSError as error:
            raise unwritable_error(path, error) from error
        print(f"deleted from {path}: {total}")
        return 0
    for file, stat in reversed(files):
        try:
            header = read_header(file)
            key = header.key
            count = len(header.tokens)
            about = f"{count} tokens of {key.model}, {key.dtype}, LoRA {key.lora[:8]}"
        except InputError:
            about = "damaged"
        used = datetime.fromtimestamp(stat.st_mtime).isoformat(" ", "minutes")
        size = f"{stat.st_size / _MIB:8.1f} MiB"
        print(one_line(f"{file.relative_to(path)}  {size}  {used}  {about}"))
    print(f"in {path}: {total}")
    return 0


main = make_main(PROG, parse_args, _list_or_purge)
