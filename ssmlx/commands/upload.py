"""The upload command: an adapter to the Hugging Face Hub, with a card made of its figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..errors import InputError, first_line, require
from ..json_files import read_json
from ..loading.folders import (
    ADAPTER_FILES,
    CONFIG_FILE,
    FIGURES_FILE,
    LORA_FILES,
    LORA_SETTINGS,
    Fetch,
    adapter_weight_files,
    home,
)
from ..loading.hub import HUB_NAME
from ..loading.names import ALIASES, resolve_adapter, resolve_model
from .parser import add_options, make_parser
from .running import make_main

if TYPE_CHECKING:
    from ..loading.adapter import StreamAdapter

PROG = "ssmlx.upload"
CARD = "README.md"
PARTS = ("base", "recipe", "data", "figures")
"""What `figures.json` holds, as `ssmlx.adapt` writes it; nothing else of it is sent."""
EPILOG = """examples:
  python -m ssmlx.upload --adapter runs/mine --repo me/streams --dry-run
  python -m ssmlx.upload --adapter runs/mine --repo me/streams --private

It uploads the adapter's settings and weights, figures.json, and a card made of these figures. It
uploads nothing else from FOLDER: no data, prompts, logs or notes.

Parts of the training text can be reconstructed from streams. An adapter that learned from --data of
yours, or whose figures.json is missing, is uploaded only with --yes-private, also to a private
repository.

Before the first upload, log in with a token that may write: `hf auth login`. Afterwards
--adapter ORG/NAME uses the adapter on any machine."""
_CARD = """---
{head}
---
# {repo}

Speculative streams for `{base}`, which drafts for itself with them. {answers}

```bash
python -m ssmlx.chat --model {base} --adapter {repo}
```

| | |
|---|---|
{rows}
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Upload an adapter to the Hugging Face Hub.", EPILOG)
    for flag, word, help in (
        ("--adapter", "FOLDER", "folder or name of an adapter, or the folder of a training run"),
        ("--repo", "ORG/NAME", "repository on the Hub; it is created if it does not exist"),
    ):
        parser.add_argument(flag, metavar=word, help=help, required=True)
    add_options(
        parser,
        (
            "--license",
            "ID",
            "licence for the card, such as apache-2.0; the base model's terms apply too",
            str,
        ),
        (
            "--base",
            "ORG/NAME",
            "Hub name of the base model, if the adapter was made from a local folder",
            str,
        ),
        ("--private", None, "create a private repository", bool),
        (
            "--yes-private",
            None,
            "confirm the upload of an adapter that learned from your own data",
            bool,
        ),
        ("--dry-run", None, "show what would be uploaded, and upload nothing", bool),
    )
    return parser.parse_args(argv)


def _send(args: argparse.Namespace) -> None:
    from ..loading.adapter import load_stream_adapter

    name = HUB_NAME.fullmatch(args.repo)
    is_name = name is not None and name[2] is None
    require(is_name, f"--repo {args.repo}", expected="org/name", do="correct it")
    folder = resolve_adapter(args.adapter) or Path(args.adapter)
    adapter = load_stream_adapter(folder)
    contents = read_files_to_publish(folder)
    figures = json.loads(contents.get(FIGURES_FILE, b"{}"))
    recorded_base = str(figures.get("base", {}).get("model") or adapter.config.base_model)
    if args.base:
        require_same_weights(args.base, figures)
    base = args.base or recorded_base or "MODEL"
    needs_base = not args.base and is_local_name(recorded_base)
    needs_yes = may_hold_private_data(figures) and not args.yes_private
    require(
        args.dry_run or not needs_yes,
        f"{folder} was trained on private data, or {FIGURES_FILE} does not say",
        expected="--yes-private, to send it all the same",
        do="see with --dry-run what would be sent",
    )
    require(
        args.dry_run or not needs_base,
        f"{folder} was made from {recorded_base or 'an unknown model'}, which only you have",
        expected="--base ORG/NAME, a Hub model with the same weights",
        do="see with --dry-run what would be sent",
    )
    if args.base:
        set_base_name(base, contents, figures)
    text = _hide_home_folder(make_card(args.repo, base, adapter, figures, args.license))
    contents[CARD] = text.encode()
    print(f"{text}\nto {args.repo}, {'private' if args.private else 'public'}:")
    for file, content in contents.items():
        print(f"{len(content):14,}  {file}")
    if args.dry_run:
        needed = [
            flag
            for flag, is_needed in (("--yes-private", needs_yes), ("--base", needs_base))
            if is_needed
        ]
        print("nothing was sent" + (f"; to send it takes {' and '.join(needed)}" if needed else ""))
    else:
        commit = _upload(args, contents)
        print(f"sent; from now on: --adapter {args.repo}@{commit}")


def read_files_to_publish(folder: Path) -> dict[str, bytes]:
    """The files that make an adapter, and no others, by name: of figures.json the entries in
    `PARTS`, and in JSON paths below the home folder as `~/`."""
    values = read_json(folder / CONFIG_FILE, "the settings of an adapter")
    found = f"{folder} is a whole model"
    expected = "an adapter"
    require(
        not values.get("fused"),
        found,
        expected=expected,
        do="upload the adapter that it was fused from",
    )
    files = [CONFIG_FILE, *adapter_weight_files(values)]
    more = [FIGURES_FILE]
    if LORA_FILES["all"] in files:
        more.append(LORA_SETTINGS)
    files += [file for file in more if (folder / file).is_file()]
    contents = {}
    for file in files:
        contents[file] = (folder / file).read_bytes()
        if file.endswith(".json"):
            values = read_json(folder / file, "settings")
            if file == FIGURES_FILE:
                parts = {part: values.get(part) for part in PARTS}
                values = {name: part for name, part in parts.items() if isinstance(part, dict)}
            text = json.dumps(values, indent=1, ensure_ascii=False)
            contents[file] = _hide_home_folder(text).encode()
    return contents


def is_local_name(base: str) -> bool:
    """Whether a base model's name is a path, or nothing that another machine could resolve."""
    is_path = base.startswith((".", "/", "~")) or Path(base).exists()
    return is_path or not (HUB_NAME.fullmatch(base) or base in ALIASES)


def require_same_weights(name: str, figures: Mapping[str, Any]) -> None:
    """Refuse an adapter made from other weights, by the digest of all bytes; nothing is downloaded,
    so a model that is not here is not compared, which is printed."""
    from ..loading.identity import stored_weights_digest

    require(
        not is_local_name(name), f"--base {name}", expected="org/name, or an alias", do="correct it"
    )
    wanted = figures.get("base", {}).get("weights")
    try:
        found = stored_weights_digest(resolve_model(name, Fetch(offline=True)))
    except InputError:
        print(f"{name} is not on this machine: its weights were not compared", file=sys.stderr)
        return
    if wanted is not None and "-" not in wanted:
        print("figures.json is of an earlier version: weights were not compared", file=sys.stderr)
        return
    what = f"the adapter was made from other weights than {name} has"
    require(wanted in (None, found), what, expected="the very same", do="correct --base")


def set_base_name(base: str, contents: dict[str, bytes], figures: dict[str, Any]) -> None:
    settings = json.loads(contents[CONFIG_FILE])
    settings["base_model"] = base
    contents[CONFIG_FILE] = json.dumps(settings, indent=1, ensure_ascii=False).encode()
    if isinstance(figures.get("base"), dict):
        figures["base"]["model"] = base
        contents[FIGURES_FILE] = json.dumps(figures, indent=1, ensure_ascii=False).encode()


def _hide_home_folder(text: str) -> str:
    """A text whose paths below the home folder begin with `~/`, so that it does not name the
    user."""
    return text if home() == Path("/") else text.replace(f"{home()}/", "~/")


def may_hold_private_data(figures: Mapping[str, Any]) -> bool:
    """Whether an adapter learned from a user's own data, or its figures do not say that it did
    not."""
    data = figures.get("data", {})
    sources = data.get("sources")
    is_public = data.get("private") is False and isinstance(sources, dict)
    return not is_public or bool(sources.get("your files"))


def make_card(
    repo: str,
    base: str,
    adapter: StreamAdapter,
    figures: Mapping[str, Mapping[str, Any]],
    licence: str | None,
) -> str:
    """The README.md of an adapter on the Hub."""
    config = adapter.config
    streams = f"{config.num_streams}, in the top {config.num_msa_layers} layers"
    rows = [f"| streams | {streams} |", f"| licence | {licence or 'as its base model'} |"]
    for title, part in figures.items():
        for name, value in part.items():
            pairs = value.items() if isinstance(value, dict) else ()
            text = ", ".join(f"{key}: {one}" for key, one in pairs) or str(value)
            text = " ".join(text.replace("|", "\\|").split())
            rows.append(f"| {title}: {name.replace('_', ' ')} | {text} |")
    head: dict[str, Any] = {"library_name": "ssmlx", "tags": ["mlx", "speculative-decoding"]}
    if (on_hub := HUB_NAME.fullmatch(base)) and not Path(base).exists():
        head |= {"base_model": on_hub[1], "base_model_relation": "adapter"}
    if licence:
        head["license"] = licence
    return _CARD.format(
        repo=repo,
        base=base,
        rows="\n".join(rows),
        head="\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items()),
        answers="LoRA changes its answers." if adapter.lora else "Its answers stay.",
    )


def _upload(args: argparse.Namespace, contents: Mapping[str, bytes]) -> str:
    """Upload the files and return the commit's id; former files of an adapter there are deleted."""
    from huggingface_hub import HfApi

    api = HfApi()
    repo = args.repo
    try:
        api.create_repo(repo, private=args.private or None, exist_ok=True)
        info = api.model_info(repo)
        there = {one.rfilename for one in info.siblings or ()}
        is_ours = CONFIG_FILE in there or there <= {".gitattributes", CARD}
        for ok, found, expected in (
            (is_ours, f"{repo} holds something else", "an adapter, or nothing"),
            (info.private or not args.private, f"{repo} is public", "it private (--private)"),
        ):
            require(bool(ok), found, expected=expected, do="choose another --repo")
        with TemporaryDirectory() as folder:
            for file, content in contents.items():
                Path(folder, file).write_bytes(content)
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message="An adapter of ssmlx",
                delete_patterns=[*ADAPTER_FILES],
            )
        return str(commit.oid)
    except InputError:
        raise
    except Exception as error:  # the client's own errors and those of two HTTP libraries
        raise InputError(
            f"{repo} cannot be written on the Hugging Face Hub ({first_line(error)})",
            expected="a token that may write there, and a network",
            do="`hf auth login`, then the same command again",
        ) from error


main = make_main(PROG, parse_args, _send)
