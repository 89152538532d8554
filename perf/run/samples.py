"""What `perf.speed` and `perf.lossless` measure: an adapter, mlx-lm beside it, and prompts.

The sample checkpoint unless the options name another adapter.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from convert.formats.adapter import read_checkpoint, write_adapter, write_fused
from ssmlx.api import end_token_ids
from ssmlx.errors import InputError
from ssmlx.loading.adapter import Adapter, load_adapter
from ssmlx.loading.attach import check_base
from ssmlx.loading.load import load, load_base, load_tokenizer
from ssmlx.loading.names import resolve_adapter, resolve_model
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import RowScope, attach_lora
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import encode_prompt, read_prompts
from ssmlx.settings import AdapterScope

from .common import BASE, ROOT
from .tasks import SAMPLE_PROMPTS

CHECKPOINT = ROOT / "examples" / "smollm2-135m-sql"
Folders = tuple[Path, Path | None]


@dataclass(frozen=True, eq=False)
class Sample:
    """Both sides of a comparison, on the same weights, and what to ask them.

    Attributes:
        name: of the adapter.
        model, tokenizer: ssmlx's.
        mlx_model: mlx-lm's own.
        prompts: tokens, under the adapter's template.
    """

    name: str
    model: StreamFusedModel
    tokenizer: TokenizerWrapper
    mlx_model: Any
    prompts: list[list[int]]

    @property
    def scope(self) -> AdapterScope:
        """Rows that the adapter's LoRA acts on."""
        assert self.model.config is not None
        return self.model.config.adapter_scope

    @property
    def can_prune(self) -> bool:
        """Whether there is a pruning adapter."""
        return self.model.streams is not None and self.model.streams.prune is not None


def add_sample_options(parser: argparse.ArgumentParser, count: int) -> None:
    """What to measure; `count` prompts by default."""
    group = parser.add_argument_group("sample")
    group.add_argument(
        "--adapter",
        metavar="NAME|FOLDER",
        help="an adapter that ships with ssmlx, or a folder (default: the sample checkpoint, "
        f"{CHECKPOINT.relative_to(ROOT)})",
    )
    group.add_argument(
        "--model", help="the adapter's base model (default: the one that it was trained on)"
    )
    group.add_argument(
        "--prompts",
        type=Path,
        default=SAMPLE_PROMPTS,
        metavar="FILE",
        help='JSON objects with a "prompt", one a line '
        f"(default: {SAMPLE_PROMPTS.relative_to(ROOT)})",
    )
    group.add_argument(
        "--count", type=int, default=count, help="the first N prompts (default: %(default)s)"
    )


def load_sample(args: argparse.Namespace, scope: AdapterScope) -> Sample:
    """What the options name; the sample checkpoint is read with `scope`.

    Raises:
        InputError: the adapter, its base or the prompts are missing or broken.
    """
    asked = read_prompts(args.prompts)[: max(0, args.count)]
    if not asked:
        raise InputError(f"--count {args.count}", expected="1 or more", do="give a larger number")
    name, folders = CHECKPOINT.name, sample_folders(scope)
    if args.adapter is not None:
        folder = _adapter_folder(args.adapter)
        name, folders = folder.resolve().name, adapter_folders(folder, args.model)
    elif args.model is not None:
        raise InputError("--model would do nothing here", expected="--adapter", do="drop --model")
    with folders as (model_folder, adapter):
        model, tokenizer, mlx_model = load_both(model_folder, adapter)
    prompts = [encode_prompt(prompt, model, tokenizer) for prompt in asked]
    return Sample(name, model, tokenizer, mlx_model, prompts)


def _adapter_folder(name: str) -> Path:
    folder = resolve_adapter(name)
    if folder is None:
        raise InputError(
            f"--adapter {name}", expected="streams to measure", do="name an adapter or its folder"
        )
    return folder


def read_own_lora(folder: Path) -> Adapter:
    """An adapter that stands beside its base model.

    Raises:
        InputError: it is broken, or a fused model.
    """
    adapter = load_adapter(folder)
    if not adapter.lora:
        raise InputError(
            f"{folder} has no LoRA of its own: it is a fused model",
            expected="an adapter folder",
            do="convert without --fuse",
        )
    return adapter


@contextmanager
def sample_folders(scope: AdapterScope) -> Iterator[Folders]:
    """The folders of the sample checkpoint, as `float_folders`."""
    path = resolve_model(BASE)
    backbone, config = load_base(path, "float32")
    adapter = read_checkpoint(
        CHECKPOINT, CHECKPOINT / "streams.safetensors", backbone, scope=scope, base_model=BASE
    )
    with float_folders(adapter, backbone, load_tokenizer(path, config), config) as folders:
        yield folders


@contextmanager
def adapter_folders(folder: Path, model: str | None = None) -> Iterator[Folders]:
    """The folders of an adapter and of its base, as `float_folders`.

    Raises:
        InputError: there are no streams to measure, or `model` is not the base.
    """
    adapter = read_own_lora(folder)
    if not adapter.config.num_streams:
        raise InputError(
            f"{folder} has no streams", expected="an adapter that drafts", do="choose another one"
        )
    path = resolve_model(model or adapter.config.base_model or BASE)
    backbone, config = load_base(path, "float32")
    check_base(adapter, backbone)
    with float_folders(adapter, backbone, load_tokenizer(path, config), config) as folders:
        yield folders


def float_folders(
    adapter: Adapter, backbone: Backbone, words: TokenizerWrapper, config: dict[str, Any]
) -> AbstractContextManager[Folders]:
    """(model folder, adapter folder) in float32, made for the block.

    For scope "all" the LoRA is merged: mlx-lm and ssmlx load the very same weights. For scope
    "streams" the model is the base, with the LoRA of a task merged if the adapter has one, and
    the adapter stands beside it.
    """
    return (
        _merged_folder(adapter, backbone, words, config)
        if adapter.config.adapter_scope == "all"
        else _two_folders(adapter, backbone, words, config)
    )


@contextmanager
def _merged_folder(
    adapter: Adapter, backbone: Backbone, words: TokenizerWrapper, config: dict[str, Any]
) -> Iterator[Folders]:
    with tempfile.TemporaryDirectory() as work:
        write_fused(Path(work), adapter, backbone, words, config)
        yield Path(work), None


@contextmanager
def _two_folders(
    adapter: Adapter, backbone: Backbone, words: TokenizerWrapper, config: dict[str, Any]
) -> Iterator[Folders]:
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as streams:
        task, dtype = adapter.task_lora, backbone.dtype
        attach_lora(backbone.model, task, RowScope(0), merge=True, dtype=dtype)
        write_adapter(Path(streams), replace(adapter, task_lora={}))
        write_base(Path(model), backbone.model, config, words)
        yield Path(model), Path(streams)


def write_base(folder: Path, model: Any, config: dict[str, Any], words: TokenizerWrapper) -> None:
    """Write a float model folder that mlx-lm loads."""
    settings = {k: v for k, v in config.items() if not k.startswith("quantization")}
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(settings, folder / "config.json")
    words.save_pretrained(folder)


def load_both(model: Path, adapter: Path | None) -> tuple[StreamFusedModel, TokenizerWrapper, Any]:
    """ssmlx's model, the tokenizer, and mlx-lm's own model of the same weights.

    For scope "all" the two share the arrays themselves: where a copy happens to lie in memory
    alone moved tokens/s by some 3 %. Both stop where the adapter's answers end.
    """
    fused, tokenizer = load(str(model), adapter=adapter, dtype="float32")
    tokenizer.eos_token_ids = end_token_ids(fused, tokenizer)
    plain, _ = mlx_lm.load(str(model))
    if adapter is None:
        plain.load_weights(tree_flatten(fused.backbone.model.parameters()))
    return fused, tokenizer, plain
