"""The options that every command shares, and how a command fails.

Light on purpose: `--help` must not wait for MLX.
"""

from __future__ import annotations

import argparse
import codecs
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..bars import PATIENCE_SECONDS, shown
from ..errors import InputError, check_choice, quoted, require
from ..json_files import parse_json
from ..loading.names import AUTO_ADAPTER, DEFAULT_ADAPTER, NO_ADAPTER, bundled_adapters
from ..settings import (
    ATTENTIONS,
    DECODINGS,
    DEFAULT_MODEL,
    DRAFT_HEADS,
    DRAFTERS,
    DTYPES,
    AcceptanceConfig,
    Attention,
    GenerateConfig,
    PruneConfig,
    TreeConfig,
    decoding_name,
)

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..drafters.registry import Loaded
    from ..model.streams import StreamFusedModel

_DEFAULTS = GenerateConfig()


class Parser(argparse.ArgumentParser):
    """A parser whose `error` prints the mistake and the hint at --help in one line, and ends with
    exit code 2.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(
    module: str, paragraphs: str | None, epilog: str | None = None, usage: str | None = None
) -> Parser:
    """Make the parser of `python -m <module>`, which has --help and no other option yet.

    Args:
        module: such as "ssmlx.chat".
        paragraphs: what the command does. The first comes before the options, the others after them
            unless there is an `epilog`.
        epilog: text after the options.
        usage: what follows the command in the usage line; None lists all options there.
    """
    description, _, more = (paragraphs or "").partition("\n\n")
    parser = Parser(
        prog=f"python -m {module}",
        usage=f"python -m {module} {usage}" if usage else None,
        description=description,
        epilog=epilog or more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


def add_int_options(
    parser: argparse._ActionsContainer, *rows: tuple[str, int, str], metavar: str | None = None
) -> None:
    """Add options that take a whole number.

    Args:
        parser: or a group of it.
        rows: (name without dashes, default, help) of each; the help is given the default.
        metavar: what the help shows for the number; None for the option's name.
    """
    for name, default, text in rows:
        add_options(parser, (f"--{name}", metavar, f"{text} (default: %(default)s)", default))


def add_prompt_or_prompts_options(group: argparse._ArgumentGroup) -> None:
    """Add --prompt TEXT and --prompts FILE, of which exactly one has to be given."""
    add_options(
        group.add_mutually_exclusive_group(required=True),
        ("--prompt", "TEXT", "the prompt to answer", str),
        (
            "--prompts",
            "FILE.jsonl",
            "several prompts: a JSON object on each line, with `prompt` or `messages`",
            Path,
        ),
    )


def _parse_json_object(text: str) -> dict[str, Any]:
    """Parse an option's value as a JSON object.

    Raises:
        argparse.ArgumentTypeError: it is anything else; argparse reports it.
    """
    with suppress(ValueError):
        if isinstance(found := parse_json(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"{quoted(text)} is not a JSON object")


def add_prompt_cache_option(group: argparse._ActionsContainer, kept: str) -> None:
    """Add --prompt-cache FILE.

    Args:
        group: a parser or a group of it.
        kept: says in the help which prompt is kept.
    """
    text = "in FILE as the model processed it; the next run with the same beginning starts at once"
    add_options(group, ("--prompt-cache", "FILE", f"keep {kept} {text}", Path))


def unescape_newlines(text: str) -> str:
    """Replace `\\n` by line ends, which are hard to type in a shell."""
    return text.replace("\\n", "\n")


_SHARED_KEYS = "acceptance=exact|typical epsilon=0.09 delta=0.3 attention=auto|mlx|fused"
"""What --drafter takes for every drafter, as `ListedDrafter.keys` are written."""

_PENALTIES = ("repetition", "presence", "frequency")
_LEGEND = """\
schedule: run streams in a pass of their own (second-pass) or in the verifying one (fused).
head: weights of the draft head. attention: MLX's (mlx), or the fused Metal kernel if faster (auto).
acceptance=typical: also accept tokens that the model finds likely. LOSSY: it changes answers."""


@dataclass(frozen=True)
class DrafterOption:
    """The parsed value of --drafter: a drafter's name, and settings by key. The name is None
    without the option.
    """

    name: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def draft_head(self) -> str:
        """`head=`, the weights of the draft head, as `ssmlx.load` takes it."""
        head: str = self.values.get("head", DRAFT_HEADS[0])
        return head

    @property
    def attention(self) -> Attention:
        """`attention=`, as `ssmlx.model.metal.choose_attention` takes it."""
        attention: Attention = self.values.get("attention", ATTENTIONS[0])
        return attention


class _ParseDrafter(argparse.Action):
    """The argparse action of --drafter; it stores a `DrafterOption`, or raises InputError."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, parse_drafter_option(values))


def parse_drafter_option(text: str) -> DrafterOption:
    """Parse a value of --drafter, such as "lookahead window=7"; no drafter's file is imported.

    Raises:
        InputError: the drafter or a key is unknown, a value is of the wrong type, or a key needs
            `acceptance=typical`.
    """
    name, *words = _split_words("--drafter", text) or [""]
    check_choice("--drafter", name, tuple(DRAFTERS))
    keys = f"{DRAFTERS[name].keys} {_SHARED_KEYS}".split()
    values = _parse_pairs(f"--drafter {name}", words, keys)
    if values.get("acceptance") != "typical":
        for key in {"epsilon", "delta"} & set(values):
            _refuse_option(f"{key}=", "acceptance=typical beside it")
    return DrafterOption(name, values)


def _drafting_arguments(option: DrafterOption) -> dict[str, Any]:
    """Return the arguments of `GenerateConfig` for a parsed --drafter; none without a name.

    Raises:
        InputError: a value is out of bounds.
    """
    if option.name is None:
        return {}
    from ..drafters.registry import registered_drafter

    values = option.values
    drafter = registered_drafter(option.name)
    found = {name: values[key] for key, name in drafter.config_keys.items() if key in values}
    if drafter.settings is not None:
        found[drafter.config_field] = _settings_of_known_keys(drafter.settings, values)
    acceptance = _settings_of_known_keys(AcceptanceConfig, values)
    return {"drafter": option.name, "acceptance": acceptance, **found}


def _settings_of_known_keys(settings_class: type, values: Mapping[str, Any]) -> Any:
    """Make a settings object from values by key; fields without a value keep their defaults.

    Args:
        settings_class: the `option` of each of its fields begins with its key.
        values: by key; keys of no field are left out.

    Raises:
        InputError: a value is out of bounds.
    """
    known: dict[str, str] = {}
    for one in fields(settings_class):
        if "allowed" in one.metadata:
            known[one.metadata["allowed"].option.partition("=")[0]] = one.name
    return settings_class(**{known[key]: value for key, value in values.items() if key in known})


def _split_words(option: str, text: str) -> list[str]:
    """Split an option's value into words as a shell does.

    Args:
        option: for the message.
        text: the value.

    Raises:
        InputError: a quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} ({error})", expected="words", do="close the quotation mark"
        ) from error


def _parse_pairs(option: str, words: Sequence[str], known_pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words.

    Args:
        option: for messages.
        words: the words; each key may stand once.
        known_pairs: the known keys with what the help shows for their values, such as "file=FILE"
            or "tokens=4"; see `_parse_value`.

    Returns:
        Values by key, of the types that `known_pairs` says.

    Raises:
        InputError: a key is unknown, repeated or without a value, or a value is of the wrong type.
    """
    found: dict[str, Any] = {}
    known = dict(one.split("=") for one in known_pairs)
    for word in words:
        key, _, value = word.partition("=")
        require(
            key in known and value != "" and key not in found,
            f"{option} {word}",
            expected=f"keys of {option}, each once: {' '.join(known_pairs)}",
            do="correct or drop it",
        )
        found[key] = _parse_value(f"{option} {word}", known[key], value)
    return found


def _parse_value(option_and_word: str, placeholder: str, text: str) -> Any:
    """Parse one value.

    Args:
        option_and_word: for messages.
        placeholder: what the help shows for the value, which says its type: "a|b" one of these
            words, capitals such as "FILE" a text or a path, "N" or digits an int, "X", "P" or a
            decimal number a float, "N,N,..." a tuple of ints.
        text: the value. A leading `~` of a path becomes the home folder.

    Returns:
        The value, of that type; words and paths as str.

    Raises:
        InputError: it is of the wrong type.
        ValueError: `placeholder` says nothing that is known, which is a mistake in `DRAFTERS`.
    """
    if "|" in placeholder:
        words = placeholder.split("|")
        expected = f"one of {placeholder}"
        require(text in words, option_and_word, expected=expected, do="choose one of them")
        return text
    if len(placeholder) > 1 and placeholder.isalpha() and placeholder.isupper():
        # In quotes, no shell does it.
        return str(Path(text).expanduser()) if text.startswith("~") else text
    expected, parse = _number_parser(placeholder)
    try:
        return parse(text)
    except ValueError:
        raise InputError(option_and_word, expected=expected, do="correct it") from None


def _number_parser(placeholder: str) -> tuple[str, Callable[[str], Any]]:
    """Return what a message expects where the help shows a number, and the function that parses it.

    Args:
        placeholder: what the help shows for the value; see `_parse_value`.

    Raises:
        ValueError: `placeholder` stands for no number.
    """
    if placeholder == "N,N,...":
        return "whole numbers with commas between", _parse_int_list
    if placeholder == "N" or placeholder.isdigit():
        return "a whole number", int
    if placeholder not in ("X", "P"):
        float(placeholder)
    return "a number", float


def _parse_int_list(text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between, such as "4,3".

    Raises:
        ValueError: it is anything else.
    """
    return tuple(int(one) for one in text.split(","))


# --- The options of a model, and of how it decodes; those that another one makes meaningless have
# no default, so that they can be refused ---


def add_model_adapter_dtype_options(parser: argparse.ArgumentParser, adapters: Any = str) -> None:
    """Add a group with --model, --adapter and --dtype.

    Args:
        parser: is given the group.
        adapters: `str`, or `list` where --adapter may be repeated.
    """
    bundled = ", ".join(bundled_adapters()) or "none in this installation"
    add_options(
        parser.add_argument_group("model"),
        (
            "--model",
            "MODEL",
            "a folder in mlx-lm's or Hugging Face's layout, a name on the Hugging Face Hub "
            "(org/name or org/name@revision), or an alias (default: %(default)s)",
            DEFAULT_MODEL,
        ),
        (
            "--adapter",
            "ADAPTER",
            f"{bundled} (they ship), a folder, a Hub name, also a LoRA of mlx-lm or PEFT, or none "
            "(default: auto: the model's own streams, else an adapter that ssmlx.adapt made for it "
            f"here, else {DEFAULT_ADAPTER})",
            adapters,
        ),
        (
            "--dtype",
            "TYPE",
            "type of the weights: as stored, or converted to float32, float16 or bfloat16 "
            "(default: auto, as stored on a GPU and float32 on a CPU)",
            DTYPES[0],
            DTYPES,
        ),
    )


def add_decoding_and_drafting_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options of decoding, sampling and drafting, in groups.

    Args:
        parser: is given the groups.
        max_tokens: default of --max-tokens.
    """
    group = parser.add_argument_group("decoding")
    add_options(
        group,
        (
            "--decoding",
            "HOW",
            "speculative (formerly streaming): draft for every call; plain: one token a call "
            "(default: for each call, what should be faster)",
            decoding_name,
            DECODINGS,
        ),
        ("--max-tokens", "N", "generate at most N tokens (default: %(default)s)", max_tokens),
        (
            "--template-args",
            "JSON",
            "variables for the chat template, such as '{\"enable_thinking\": false}'",
            _parse_json_object,
        ),
    )
    group.add_argument(
        "--stop",
        type=unescape_newlines,
        action="append",
        metavar="TEXT",
        help="end the answer before TEXT (\\n is a new line); repeatable",
    )
    group = parser.add_argument_group("sampling (drafting does not change its distribution)")
    add_options(
        group,
        ("--temp", "T", "temperature; 0 takes the likeliest token (default: 0)", 0.0),
        (
            "--top-p",
            "P",
            "sample from the likeliest tokens that together have probability P",
            float,
        ),
        (
            "--min-p",
            "P",
            "sample from tokens with at least P of the likeliest one's probability",
            float,
        ),
        ("--top-k", "K", "sample from the K likeliest tokens", int),
        (
            "--seed",
            "N",
            "same seed, same answer, whatever drafts (in float32; default: random)",
            int,
        ),
        (
            "--penalty",
            "NAME=X",
            'repetition=X, presence=X or frequency=X of recent tokens, such as "repetition=1.2 '
            f'context=64" (default: the last {_DEFAULTS.repetition_context_size}); repeatable',
            list,
        ),
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="make the same calls in every run: use no measured costs, and seed 0",
    )
    group.add_argument(
        "--logit-bias",
        type=_parse_token_bias,
        action="append",
        metavar="ID=X",
        help="add X to the logit of token ID; repeatable",
    )
    add_drafter_and_tree_options(parser)


def _parse_token_bias(text: str) -> tuple[int, float]:
    """Parse ID=X into a token id and a number.

    Raises:
        argparse.ArgumentTypeError: it is anything else; argparse reports it.
    """
    token, _, bias = text.partition("=")
    with suppress(ValueError):
        return int(token), float(bias)
    raise argparse.ArgumentTypeError(f"{quoted(text)} is not ID=X, a token's id and a number")


def add_drafter_and_tree_options(parser: argparse.ArgumentParser) -> None:
    """Add --drafter, with a table of all drafters and their settings, and the draft tree's
    options.
    """
    keys = {name: listed.keys for name, listed in DRAFTERS.items()}
    rows = [
        f"  {name:15} {'  '.join(own.split())}"
        for name, own in {**keys, "any of them": _SHARED_KEYS}.items()
    ]
    title = "Drafters, each with its settings and their defaults:"
    group = parser.add_argument_group(
        "drafting (not with --decoding plain)", "\n".join([title, *rows, _LEGEND])
    )
    group.add_argument(
        "--drafter",
        action=_ParseDrafter,
        default=DrafterOption(),
        metavar='"NAME ..."',
        help='such as "lookahead window=7" (default: streams if there are any)',
    )
    text = "Without these and --decoding, the size is chosen for each call, by measured costs."
    add_streams_tree_prune_options(parser.add_argument_group("draft tree", text))


def add_streams_tree_prune_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of streams, of the draft tree and of its pruning; none has a default."""
    tree = TreeConfig()
    prune = PruneConfig()
    add_options(
        group,
        (
            "--num-streams",
            "G",
            "streams to use, each of which drafts one token ahead (default: all)",
            int,
        ),
        (
            "--tree",
            None,
            "for streams and Medusa heads. full: K children for every node; best: the N "
            "likeliest nodes (default: best)",
            str,
            ("full", "best"),
        ),
        (
            "--tree-width",
            "K",
            f"K, most children of a node (default: {tree.full_width} for full, no limit for best)",
            int,
        ),
        (
            "--tree-size",
            "N",
            f"N, nodes of the best tree with its root (default: {tree.size})",
            int,
        ),
        (
            "--prune",
            "HOW",
            "drop unlikely nodes before the upper layers. budget: keep the M likeliest; "
            "threshold=P: keep nodes with a probability of at least P given their parent "
            f"(default: off; P: {prune.threshold})",
            str,
        ),
        ("--prune-to", "M", f"M, nodes that --prune budget keeps (default: {prune.keep})", int),
    )


def add_options(group: argparse._ActionsContainer, *rows: tuple[Any, ...]) -> None:
    """Add options from rows.

    Args:
        group: a parser or a group of it.
        rows: (flag, metavar or None, help, default or type, allowed values if there are few) each.
            In the fourth place `bool` makes a flag without a value, `list` an option that may be
            repeated, a list of values an option that takes several and has these as its default;
            another type or function has no default.
    """
    for flag, word, text, default, *choices in rows:
        more: dict[str, Any] = {"type": default, "choices": choices[0] if choices else None}
        if default is bool:
            more = {"action": "store_true"}
        elif default is list:
            more = {"action": "append"}
        elif isinstance(default, list):
            more |= {"type": type(default[0]), "default": default, "nargs": "+"}
        elif not callable(default):
            more |= {"type": type(default), "default": default}
        group.add_argument(flag, help=text, **more, **({"metavar": word} if word else {}))


_CHANCE_OPTIONS = ("top_p", "min_p", "top_k", "seed")
_TREE_OPTIONS = ("tree", "tree_width", "tree_size")
_PRUNE_OPTIONS = ("prune", "prune_to")
_SHAPE_OPTIONS = {
    "num_streams": "num_streams",
    **dict.fromkeys(_TREE_OPTIONS, "tree"),
    **dict.fromkeys(_PRUNE_OPTIONS, "prune"),
}
"""Options, and the field of `GenerateConfig` that each belongs to."""


def generate_config(args: argparse.Namespace) -> GenerateConfig:
    """Return the settings that a command's options give; options that were not given have defaults.

    Args:
        args: options of `add_decoding_and_drafting_options`, or some of them.

    Raises:
        InputError: a value is out of bounds, or an option would have no effect.
    """
    drafter: DrafterOption = getattr(args, "drafter", DrafterOption())
    prune, has_threshold, _ = (getattr(args, "prune", None) or "").partition("=")
    _reject_idle_options(args, drafter.name, prune)
    tree = _renamed_given_options(args, kind="tree", width="tree_width", size="tree_size")
    pruning = {
        **({"kind": prune} if prune else {}),
        **_renamed_given_options(args, keep="prune_to"),
    }
    if has_threshold:
        pruning |= _parse_pairs("--prune", [args.prune], ["threshold=P"])
    bias = getattr(args, "logit_bias", None)
    names = ("decoding", "max_tokens", "stop", "num_streams", "temp", *_CHANCE_OPTIONS)
    return GenerateConfig(
        tree=TreeConfig(**tree) if tree else None,
        prune=PruneConfig(**pruning) if pruning else None,
        logit_bias=dict(bias) if bias else None,
        **_drafting_arguments(drafter),
        **_penalty_arguments(getattr(args, "penalty", None) or ()),
        **_renamed_given_options(
            args, **{name: name for name in (*names, "logprobs", "deterministic")}
        ),
    )


def _renamed_given_options(args: argparse.Namespace, **sources: str) -> dict[str, Any]:
    """Return the values of some options by new names; those that were not given are left out.

    Args:
        args: parsed options; one that is None or missing was not given.
        sources: the option's name by the new name.
    """
    found = {name: getattr(args, source, None) for name, source in sources.items()}
    return {name: value for name, value in found.items() if value is not None}


def _penalty_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings of all --penalty values, as arguments of `GenerateConfig`.

    A value has words such as `repetition=1.2`; `context=` in it holds for the penalties of that
    value.

    Args:
        texts: the values.

    Raises:
        InputError: a penalty is given twice, a value has none, or a word is wrong.
    """
    settings: dict[str, Any] = {}
    shown = [*(f"{name}=X" for name in _PENALTIES), "context=N"]
    for text in texts:
        given = _parse_pairs("--penalty", _split_words("--penalty", text), shown)
        context = given.pop("context", None)
        if not given:
            _refuse_option(f"--penalty {text}", "repetition=X, presence=X or frequency=X in it")
        for name, value in given.items():
            require(
                f"{name}_penalty" not in settings,
                f"--penalty {name}= twice",
                expected="each once",
                do="drop one",
            )
            settings[f"{name}_penalty"] = value
            if context is not None:
                settings[f"{name}_context_size"] = context
    return settings


def _reject_idle_options(args: argparse.Namespace, drafter: str | None, prune: str) -> None:
    """Raise InputError for an option that would have no effect beside the others.

    Args:
        args: parsed options.
        drafter: name that --drafter gives, or None.
        prune: kind that --prune gives, or "".
    """
    if getattr(args, "decoding", None) == "plain":
        if drafter is not None:
            _refuse_option("--drafter", "speculative decoding")
        reject_given_options(args, _SHAPE_OPTIONS, "speculative decoding")
    for option, name in _SHAPE_OPTIONS.items():
        if drafter is not None and getattr(args, option, None) is not None:
            able = _drafters_shaped_by(name)
            if drafter not in able:
                reject_given_options(args, (option,), "--drafter " + " or ".join(able))
    if getattr(args, "tree", None) == "full":
        reject_given_options(args, ("tree_size",), "--tree best")
    if prune != "budget":
        reject_given_options(args, ("prune_to",), "--prune budget")
    if getattr(args, "deterministic", None):
        reject_given_options(args, ("prompt_cache",), "no --deterministic")
    if not getattr(args, "temp", 0.0):
        reject_given_options(args, _CHANCE_OPTIONS, "--temp above 0")


def _drafters_shaped_by(name: str) -> list[str]:
    """Return the names of drafters whose trees the field `name` of `GenerateConfig` has an effect
    on.
    """
    from ..drafters.registry import registered_drafter

    return [one for one in DRAFTERS if name in registered_drafter(one).shaped_by]


def reject_given_options(args: argparse.Namespace, names: Iterable[str], needs: str) -> None:
    """Raise InputError for the first of these options that was given.

    Args:
        args: parsed options.
        names: of options, with underscores; one that is None, False or missing was not given.
        needs: what the option needs to have an effect, for the message.
    """
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            _refuse_option("--" + name.replace("_", "-"), needs)


def _refuse_option(option: str, needs: str) -> NoReturn:
    """Raise `InputError`: `option` has no effect without `needs`."""
    raise InputError(f"{option} would do nothing here", expected=needs, do=f"drop {option}")


def load_for_decoding(
    args: argparse.Namespace,
) -> tuple[StreamFusedModel, TokenizerWrapper, list[Loaded]]:
    """Load what the options name for decoding.

    Where --drafter names another drafter than streams, no adapter is looked for. `args.adapter`
    becomes the name of what was loaded; see `load_target_and_note_adapter`.

    Args:
        args: options of `add_model_adapter_dtype_options` and `add_decoding_and_drafting_options`.

    Returns:
        (model, tokenizer, list of the draft model or heads, or empty), as `ssmlx.stream_generate`
        takes them.

    Raises:
        InputError: something cannot be loaded, or a tree option has no effect on this model; before
            anything is loaded, --drafter names a drafter without the key that it needs.
    """
    from ..model.ranks import launched_group

    drafter: DrafterOption = args.drafter
    require_drafter_key(drafter)
    group = launched_group()
    if group is not None and getattr(args, "prompt_cache", None) is not None:
        _refuse_option("--prompt-cache", "a model that is not split over processes")
    model, tokenizer = load_target_and_note_adapter(
        args,
        finds_adapter=drafter.name in (None, "streams"),
        draft_head=drafter.draft_head,
        attention=drafter.attention,
        group=group,
    )
    if model.num_streams == 0:
        streams = "a model with streams, that is an --adapter with some"
        reject_given_options(args, ("num_streams", *_PRUNE_OPTIONS), streams)
        if drafter.name is None or drafter.name == "streams":
            others = [one for one in _drafters_shaped_by("tree") if one != "streams"]
            reject_given_options(
                args, _TREE_OPTIONS, f"{streams}, or --drafter {' or '.join(others)}"
            )
    return model, tokenizer, load_what_drafter_needs(args, model, tokenizer)


def require_drafter_key(option: DrafterOption) -> None:
    """Raise InputError where a drafter is named without the key that it needs, such as `model=`."""
    from ..drafters.registry import registered_drafter

    if option.name is not None:
        registered_drafter(option.name).require_key_of_loader(option.values.keys())


def load_what_drafter_needs(
    args: argparse.Namespace, model: StreamFusedModel, tokenizer: TokenizerWrapper
) -> list[Loaded]:
    """Load what the drafter of --drafter drafts with, such as a draft model or heads.

    Args:
        args: its `drafter` and `dtype` are read.
        model: the target, as `ssmlx.load` returns it.
        tokenizer: likewise.

    Returns:
        A list of what was loaded; empty if --drafter names no drafter, or one that needs nothing.

    Raises:
        InputError: it cannot be loaded, or does not fit the model.
    """
    from ..drafters.registry import registered_drafter

    drafter: DrafterOption = args.drafter
    loader = registered_drafter(drafter.name).loader if drafter.name else None
    name = loader.name_or_default_in(drafter.values) if loader else None
    if loader is None or name is None:
        return []
    how = {"dtype": args.dtype, "progress": DownloadBar()}
    return [loader.load(name, model, tokenizer, **how)]


def load_target_and_note_adapter(
    args: argparse.Namespace,
    *,
    finds_adapter: bool = True,
    draft_head: str = DRAFT_HEADS[0],
    attention: Attention = ATTENTIONS[0],
    group: Any = None,
) -> tuple[StreamFusedModel, TokenizerWrapper]:
    """Load the model and tokenizer that the options of `add_model_adapter_dtype_options` name.

    The attention of the whole process is set.

    Args:
        args: parsed options. `adapter` is set to the name of the adapter that was loaded: "none"
            for the base alone, None for streams that are part of the model.
        finds_adapter: whether to look for a fitting adapter where none is named.
        draft_head: weights of the draft head, as `ssmlx.load` takes it.
        attention: as `ssmlx.model.metal.choose_attention` takes it.
        group: MLX's distributed group, for a model that is split over processes; None for one
            process.

    Returns:
        The model and its tokenizer.

    Raises:
        InputError: the model or the adapter cannot be loaded.
    """
    from ..loading.attach import choose_adapter, swap_adapter
    from ..loading.load import load
    from ..model import metal

    if args.adapter == AUTO_ADAPTER:
        args.adapter = None
    metal.choose_attention(attention)
    model, tokenizer = load(
        args.model,
        adapter=args.adapter,
        dtype=args.dtype,
        draft_head=draft_head,
        progress=DownloadBar(),
        group=group,
    )
    if args.adapter is None and model.config is None:
        asked = AUTO_ADAPTER if finds_adapter else NO_ADAPTER
        args.adapter, folder = choose_adapter(asked, model)
        if folder is not None:
            model = swap_adapter(model, folder)
    return model, tokenizer


def launched_rank() -> int:
    """Which of `mlx.launch`'s processes this is; the first one shows and writes for all."""
    return int(os.environ.get("MLX_RANK", "0"))


@contextmanager
def silent_unless_first_rank() -> Iterator[None]:
    """Inside the block, processes of `mlx.launch` other than the first print nothing, also on
    standard error.
    """
    if launched_rank() == 0:
        yield
        return
    with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
        yield


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Inside the block, log messages of `ssmlx` go to standard error from INFO on, and bars are
    shown.
    """
    handler = logging.StreamHandler()
    logger = logging.getLogger("ssmlx")
    bars = shown.set(True)
    handler.setFormatter(logging.Formatter("ssmlx: %(message)s"))
    level = logger.level
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library's handler on the root would say each line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        shown.reset(bars)


def run_command(main: Callable[[], int | None], prog: str) -> int:
    """Run a command and return its exit code.

    0 if it ended well; 2 after one line on standard error for bad input or a file error; 130 for
    Ctrl-C; 1 if another process of `mlx.launch` has ended. A closed pipe counts as a good end.
    Other errors are raised.

    Args:
        main: the command; its return value is the exit code, None for 0.
        prog: its name, for messages.
    """
    if rank := launched_rank():
        prog += f" (rank {rank})"
    try:
        with _usable_standard_streams(), silent_unless_first_rank(), logging_to_stderr():
            code = main() or 0
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if "connection to a peer" not in str(error):
            raise
        print(f"{prog}: error: another process of the group has ended", file=sys.stderr)
        return 1
    except BrokenPipeError:
        _discard_output()
        return 0
    except (InputError, OSError) as error:  # a full disk, a name that is too long, ...
        shown_error = file_error(error) if isinstance(error, OSError) else error
        print(f"{prog}: error: {shown_error}", file=sys.stderr)
        if isinstance(error, OSError):
            _discard_output()
        return 2


def file_error(error: OSError) -> InputError:
    """Make the InputError for an error of the file system; it names the file, or standard output
    where the error has none.
    """
    place = error.filename or "standard output"
    return InputError(
        f"{place}: {error.strerror or error}",
        expected="files that can be read and written, and room for them",
        do="choose another place",
    )


@contextmanager
def _usable_standard_streams() -> Iterator[None]:
    """Make standard input, output and error usable inside the block.

    One that a shell closed, which Python has as None, becomes the null device. A character that
    standard output cannot encode is written as an escape, such as \\u20ac. Afterwards they are as
    before.
    """
    with ExitStack() as restored:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, restored.enter_context(Path(os.devnull).open(mode)))
                restored.callback(setattr, sys, name, None)
        out = sys.stdout
        if isinstance(out, TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
            restored.callback(out.reconfigure, errors=out.errors)
            out.reconfigure(errors="backslashreplace")
        yield


def print_json(value: object) -> None:
    """Print a value as one line of JSON, at once; in ASCII where standard output is not UTF-8."""
    encoding = sys.stdout.encoding or "utf-8"  # text that stays in memory has none
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    print(json.dumps(value, ensure_ascii=not is_utf8), flush=True)


def _discard_output() -> None:
    """Send what is still unwritten on standard output, and all that follows, to the null device, so
    that Python's end does not fail.
    """
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def make_main(
    prog: str,
    parse: Callable[[list[str] | None], argparse.Namespace],
    act: Callable[[argparse.Namespace], int | None],
) -> Callable[..., int]:
    """Make the `main` function of a command.

    Args:
        prog: its name, for messages.
        parse: parses the words after the command; None stands for the process's own.
        act: does what the options say; its return value is the exit code, None for 0.

    Returns:
        A function that takes these words, or None, and returns the exit code of `run_command`.
        argparse ends the process for --help and for wrong options.
    """

    def main(argv: list[str] | None = None) -> int:
        return run_command(lambda: act(parse(argv)), prog)

    return main


def with_lock_on_out_folder(
    act: Callable[[argparse.Namespace], int | None],
) -> Callable[[argparse.Namespace], int | None]:
    """Wrap a command's function so that it holds a lock on the folder `args.out` while it runs.

    Returns:
        The function. It raises InputError where another process holds the folder.
    """

    def held(args: argparse.Namespace) -> int | None:
        """Run the command's function, holding the lock; return its exit code."""
        from ..loading.files import locked_folder_removed_if_empty

        with locked_folder_removed_if_empty(args.out):
            return act(args)

    return held


class CallbackBar:
    """A progress bar to pass as a callback. It appears after two seconds, on a terminal, and
    vanishes when done.
    """

    def __init__(self, label: str, unit: str, **settings: Any) -> None:
        self._settings = {"desc": label, "unit": unit, "leave": False, **settings}
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show progress: `done` of `total` units. The bar ends at the last; another call then
        begins a new one.
        """
        if self._bar is None:
            from huggingface_hub.utils import tqdm

            self._bar = tqdm(disable=None, delay=PATIENCE_SECONDS, **self._settings)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None


PromptBar = partial(CallbackBar, "prompt", "token")
DownloadBar = partial(CallbackBar, "download", "B", unit_scale=True)
