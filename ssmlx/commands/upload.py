"""The upload command: an adapter to the Hugging Face Hub, with a card made of its figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, first_line, require
from ..json_files import read_json
from ..loading.names import (
    ADAPTER_FILES,
    CONFIG_FILE,
    FIGURES_FILE,
    HUB_NAME,
    LORA_FILES,
    LORA_SETTINGS,
    adapter_weights,
    resolve_adapter,
)
from .options import add_options, command, make_parser

if TYPE_CHECKING:
    from ..loading.adapter import Adapter

PROG = "ssmlx.upload"
CARD = "README.md"
EPILOG = """examples:
  python -m ssmlx.upload --adapter runs/mine --repo me/streams --dry-run
  python -m ssmlx.upload --adapter runs/mine --repo me/streams --private

What is sent: the adapter's settings and weights, figures.json, and a card that is made of these.
Nothing else that lies in FOLDER: no data, prompts, logs or notes of yours.

Streams tell of the text that they learned from. Those that learned from --data of yours, or from
nobody knows what (without figures.json), are sent with --yes-private alone, --private or not.
A token that may write comes first: `hf auth login`. Then: --adapter me/streams, on any machine."""
_CARD = """---
{head}
---
# {repo}

Speculative streams for `{base}`, which drafts for itself with them. {told}

```bash
python -m ssmlx.chat --model {base} --adapter {repo}
```

| | |
|---|---|
{rows}

{measured}
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROG, "Share an adapter on the Hugging Face Hub.", EPILOG)
    for flag, word, told in (
        ("--adapter", "FOLDER", "an adapter, or a training run"),
        ("--repo", "ORG/NAME", "where to; made if it is not there"),
    ):
        parser.add_argument(flag, metavar=word, help=told, required=True)
    add_options(
        parser,
        ("--license", "ID", "such as apache-2.0; what comes of a model has its terms", str),
        ("--private", None, "for you, or your organisation, alone", bool),
        ("--yes-private", None, "send what was learned from data of yours, too", bool),
        ("--yes", None, "do not ask", bool),
        ("--dry-run", None, "show what would be sent, and send nothing", bool),
    )
    return parser.parse_args(argv)


def _main(args: argparse.Namespace) -> int:
    from ..loading.adapter import load_adapter

    folder = resolve_adapter(args.adapter) or Path(args.adapter)
    adapter = load_adapter(folder)
    contents = adapter_contents(folder)
    figures = json.loads(contents.get(FIGURES_FILE, b"{}"))
    name = HUB_NAME.fullmatch(args.repo)
    is_name = name is not None and name[2] is None
    require(is_name, f"--repo {args.repo}", expected="org/name", do="correct it")
    needs_yes = may_be_private(figures) and not args.yes_private
    require(
        args.dry_run or not needs_yes,
        f"{folder} was trained on data of yours, or nobody can tell (in {FIGURES_FILE})",
        expected="--yes-private, to send it all the same",
        do="see with --dry-run what would be sent",
    )
    text = _without_home(card(args.repo, adapter, figures, args.license))
    contents[CARD] = text.encode()
    print(f"{text}\nto {args.repo}, {'private' if args.private else 'for everybody to see'}:")
    for file, content in contents.items():
        print(f"{len(content):14,}  {file}")
    if args.dry_run or not _is_wanted(args):
        print("nothing was sent" + "; to send it takes --yes-private" * needs_yes)
        return 0 if args.dry_run else 1
    print(f"sent; from now on: --adapter {args.repo}@{_send(args, contents)}")
    return 0


def adapter_contents(folder: Path) -> dict[str, bytes]:
    """The contents of what makes the adapter in a folder, by name, and of nothing beside it."""
    values = read_json(folder / CONFIG_FILE, "the settings of an adapter")
    found = f"{folder} is a whole model"
    expected = "an adapter"
    require(not values.get("fused"), found, expected=expected, do="send what it was fused from")
    files = [CONFIG_FILE, *adapter_weights(values)]
    more = [FIGURES_FILE]
    if LORA_FILES["all"] in files:
        more.append(LORA_SETTINGS)
    files += [file for file in more if (folder / file).is_file()]
    contents = {file: (folder / file).read_bytes() for file in files}
    for file in (file for file in files if file.endswith(".json")):
        text = json.dumps(read_json(folder / file, "settings"), indent=1, ensure_ascii=False)
        contents[file] = _without_home(text).encode()
    return contents


def _without_home(text: str) -> str:
    """A text that does not say whose paths are in it."""
    return text if Path.home() == Path("/") else text.replace(f"{Path.home()}/", "~/")


def may_be_private(figures: Mapping[str, Any]) -> bool:
    """Whether an adapter learned from somebody's own data, as far as its figures tell."""
    data = figures.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("sources"), dict):
        return True
    return data.get("private") is not False or bool(data["sources"].get("your files"))


def card(repo: str, adapter: Adapter, figures: Mapping[str, Any], licence: str | None) -> str:
    """The README.md of an adapter on the Hub; what it was made of and what it reaches are the
    lines of `figures.json`, none where that is not there."""
    config = adapter.config
    streams = f"{config.num_streams}, in the top {config.num_msa_layers} layers"
    parts: dict[str, Any] = {
        "adapter": {"streams": streams, "licence": licence or "as its base model's"},
        "base": {"model": config.base_model or "MODEL"},
        **figures,
    }
    require(
        all(isinstance(part, dict) for part in parts.values())
        and "model" in parts["base"]
        and {*figures} in (set(), {"base", "recipe", "data", "figures"}),
        f"{FIGURES_FILE} holds other things than figures, or not all",
        expected="what ssmlx.adapt writes",
        do="measure again, or remove it",
    )
    base = str(parts["base"]["model"])
    rows = []
    for title, part in parts.items():
        for name, value in part.items():
            pairs = value.items() if isinstance(value, dict) else ()
            told = ", ".join(f"{key}: {one}" for key, one in pairs) or str(value)
            told = " ".join(told.replace("|", "\\|").split())
            rows.append(f"| {title}: {name.replace('_', ' ')} | {told} |")
    head: dict[str, Any] = {"library_name": "ssmlx", "tags": ["mlx", "speculative-decoding"]}
    if (on_hub := HUB_NAME.fullmatch(base)) and not Path(base).exists():
        head |= {"base_model": on_hub[1], "base_model_relation": "adapter"}
    head |= {"license": licence} if licence else {}
    return _CARD.format(
        repo=repo,
        base=base,
        rows="\n".join(rows),
        head="\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items()),
        told="LoRA changes its answers." if adapter.every_row_lora else "Its answers stay.",
        measured=f"From [{FIGURES_FILE}]({FIGURES_FILE}); tokens per target call, after the "
        "prompt's, are by nodes of the tree."
        if figures
        else "It was not measured, nor is it told what it was trained on.",
    )


def _is_wanted(args: argparse.Namespace) -> bool:
    if args.yes:
        return True
    is_seen = sys.stdin.isatty() and sys.stdout.isatty()
    do = "look at what --dry-run shows first"
    require(is_seen, "nobody can be asked here", expected="a terminal, or --yes", do=do)
    with suppress(EOFError):
        return input("send it? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _send(args: argparse.Namespace, contents: Mapping[str, bytes]) -> str:
    """Send all of it as one commit, or nothing; gives the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

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
        old = sorted(there & set(ADAPTER_FILES) - set(contents))
        operations = [
            *(CommitOperationAdd(file, content) for file, content in contents.items()),
            *(CommitOperationDelete(file) for file in old),
        ]
        return str(api.create_commit(repo, operations, commit_message="An adapter of ssmlx").oid)
    except InputError:
        raise
    except Exception as error:  # the client's own errors and those of two HTTP libraries
        raise InputError(
            f"{repo} cannot be written on the Hugging Face Hub ({first_line(error)})",
            expected="a token that may write there, and a network",
            do="`hf auth login`, then the same command again",
        ) from error


main = command(PROG, parse_args, _main)
