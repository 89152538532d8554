"""`python -m ssmlx.convert`: a PyTorch checkpoint becomes an MLX adapter folder."""

import argparse
import sys
from pathlib import Path

from ssmlx.commands.parser import add_options, make_parser, reject_given_options
from ssmlx.commands.running import make_main
from ssmlx.errors import InputError, require
from ssmlx.json_files import read_json
from ssmlx.settings import ADAPTER_SCOPES, DEFAULT_MODEL, DTYPES

PROG = "ssmlx.convert"
EPILOG = """examples:
  python -m ssmlx.convert --lora CHECKPOINT --streams CHECKPOINT/streams.safetensors \\
      --out adapters/sql
  python -m ssmlx.chat --adapter adapters/sql
  python -m ssmlx.convert --heads MEDUSA --base MODEL --out heads/medusa

LoRA is read as PEFT writes it: safetensors, or .bin, whose pickled code is not run. Streams are
read from a safetensors file with streams_config.json beside it. A tensor that is missing or unknown
is an error. The folder --out is written whole or not at all. mlx-lm loads an adapter of scope all,
too, without its streams (--adapter-path)."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        PROG,
        "Convert a PyTorch checkpoint of streams, or drafting heads, into files that ssmlx loads.",
        EPILOG,
    )
    add_options(
        parser,
        (
            "--base",
            "MODEL",
            "the model that the adapter was trained on: a folder, a Hub name or an "
            "alias (default: %(default)s)",
            DEFAULT_MODEL,
        ),
        (
            "--streams",
            "FILE",
            "safetensors file with the streams' weights (default: streams.safetensors in --lora)",
            Path,
        ),
        (
            "--task-lora",
            "FOLDER",
            "LoRA of the fine-tuned model that streams of scope streams draft for (default: "
            "task_lora in --lora, if there is one)",
            Path,
        ),
        (
            "--scope",
            None,
            "rows that LoRA acts on. all: every row, which changes the model's answers; streams: "
            "stream rows alone (default: as the checkpoint says)",
            str,
            ADAPTER_SCOPES,
        ),
        (
            "--dtype",
            None,
            "type of the weights that are written; float16 halves an adapter of float32 "
            "(default: %(default)s)",
            "stored",
            DTYPES,
        ),
        (
            "--fuse",
            None,
            "write a whole model folder, with LoRA of scope all merged into its weights",
            bool,
        ),
    )
    add_options(
        parser.add_mutually_exclusive_group(required=True),
        ("--lora", "FOLDER", "a checkpoint of ssmlx.convert.train, or an adapter", Path),
        (
            "--heads",
            "FOLDER",
            "drafting heads instead of streams, as others publish them: Medusa's "
            "(medusa_lm_head.safetensors or .pt, or a model with medusa_head.* among its weights), "
            "or an MLP speculator",
            Path,
        ),
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    return parser.parse_args(argv)


def _has_format(file: Path, format: str) -> bool:
    try:  # a PyTorch checkpoint has a settings file of the same name
        return read_json(file, format).get("format") == format
    except InputError:
        return False


def _is_adapter(folder: Path) -> bool:
    from ssmlx.loading import adapter, folders

    return _has_format(folder / folders.CONFIG_FILE, adapter.FORMAT)


def _check_out_is_replaceable(out: Path) -> None:
    """Refuse an `out` that holds anything but an adapter or heads of this package."""
    from ssmlx.drafters import heads
    from ssmlx.loading.files import require_nothing_else_in
    from ssmlx.loading.folders import MODEL_FILES

    do = "choose another --out"
    is_new = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(
        is_new or _is_adapter(out) or _has_format(out / heads.CONFIG_FILE, heads.FORMAT),
        f"{out} exists and is not an adapter",
        expected="a new folder, or an adapter to replace",
        do=do,
    )
    require_nothing_else_in(out, MODEL_FILES, do)


def _check_sources_exist(args: argparse.Namespace) -> None:
    for flag in ("heads",) if args.heads else ("lora", "task_lora", "streams"):
        path = getattr(args, flag)
        found = f"--{flag.replace('_', '-')} {path} does not exist"
        kind = "a file" if flag == "streams" else "a folder"
        require(path is None or path.exists(), found, expected=kind, do="check the path")


def _convert_heads(args: argparse.Namespace) -> None:
    from ssmlx.drafters.heads import save_heads
    from ssmlx.loading.files import atomic_folder
    from ssmlx.loading.load import load_base
    from ssmlx.loading.names import resolve_model

    from .formats.heads import convert_heads

    reject_given_options(args, ("streams", "scope", "fuse", "task_lora"), "--lora")
    with atomic_folder(args.out) as folder:
        backbone, _ = load_base(resolve_model(args.base), "stored")
        heads = convert_heads(args.heads, backbone, args.base, args.dtype)
        save_heads(folder, heads)
    print(
        f"{args.out}: {heads.config.kind}, {heads.config.num_levels} tokens ahead, "
        f"{heads.config.num_parameters:,} parameters",
        file=sys.stderr,
    )


def _convert_streams(args: argparse.Namespace) -> None:
    from ssmlx.loading.adapter import load_stream_adapter, write_adapter
    from ssmlx.loading.files import atomic_folder
    from ssmlx.loading.load import load_base, load_tokenizer
    from ssmlx.loading.lora_files import num_parameters
    from ssmlx.loading.names import resolve_model

    from .formats.adapter import cast_adapter, read_checkpoint, write_fused_model
    from .reference.format import STREAMS_WEIGHTS, TASK_LORA

    task = args.task_lora
    if task is None and (args.lora / TASK_LORA).is_dir():
        task = args.lora / TASK_LORA
    with atomic_folder(args.out) as folder:
        path = resolve_model(args.base)
        backbone, model_config = load_base(path, args.dtype if args.fuse else "stored")
        if _is_adapter(args.lora):
            reject_given_options(
                args, ("streams", "scope", "task_lora"), "a checkpoint and no adapter"
            )
            adapter = load_stream_adapter(args.lora)
        else:
            adapter = read_checkpoint(
                args.lora,
                args.streams or args.lora / STREAMS_WEIGHTS,
                backbone,
                scope=args.scope,
                base_model=args.base,
                task_folder=task,
            )
        tokenizer = load_tokenizer(path, model_config)
        if args.fuse:
            write_fused_model(folder, adapter, backbone, tokenizer, model_config)
        else:
            write_adapter(folder, cast_adapter(adapter, args.dtype))
    config = adapter.config
    lora = adapter.trained_lora
    size = num_parameters(lora)
    task_size = num_parameters(adapter.task_lora)
    kind = "merged" if args.fuse else f"scope {config.adapter_scope}"
    beside = f"; beside LoRA of the task, {task_size:,} parameters" if task_size else ""
    print(
        f"{args.out}: {config.num_streams} streams in the top {config.num_msa_layers} of "
        f"{config.num_layers} layers, {adapter.streams.num_parameters:,} stream parameters; LoRA "
        f"on {len(lora)} modules, {size:,} parameters, {kind}{beside}",
        file=sys.stderr,
    )


def convert_checkpoint(args: argparse.Namespace) -> None:
    _check_sources_exist(args)
    _check_out_is_replaceable(args.out)
    (_convert_heads if args.heads else _convert_streams)(args)


main = make_main(PROG, parse_args, convert_checkpoint)

if __name__ == "__main__":
    raise SystemExit(main())
