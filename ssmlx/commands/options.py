"""The options that every command shares, and how a command fails.

Light on purpose: `--help` must not wait for MLX.
"""

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
from typing import Any, NoReturn

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
)

_DEFAULTS = GenerateConfig()


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(
    module: str, text: str | None, epilog: str | None = None, usage: str | None = None
) -> Parser:
    """A parser for `python -m <module>`; `usage` is what follows that, where it is short, and the
    epilog what follows the first paragraph of `text` unless given."""
    description, _, more = (text or "").partition("\n\n")
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


def add_counts(
    parser: argparse._ActionsContainer, *rows: tuple[str, int, str], metavar: str | None = None
) -> None:
    """Options that are whole numbers: (name without dashes, default, what it is) each."""
    for name, default, text in rows:
        add_options(parser, (f"--{name}", metavar, f"{text} (default: %(default)s)", default))


def add_prompt_options(group: argparse._ArgumentGroup) -> None:
    add_options(
        group.add_mutually_exclusive_group(required=True),
        ("--prompt", "TEXT", "one prompt", str),
        ("--prompts", "FILE.jsonl", "a JSON object a line, field `prompt` or `messages`", Path),
    )


def _json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := parse_json(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"{quoted(text)} is not a JSON object")


def add_prompt_cache_option(group: argparse._ActionsContainer, kept: str) -> None:
    """A file to keep a processed prompt in: what is `kept`."""
    text = "processed in FILE; what begins like it starts at once, under the same model and LoRA"
    add_options(group, ("--prompt-cache", "FILE", f"keep {kept} {text}", Path))


def template_text(text: str) -> str:
    """What --template stands for: `\\n` in it is a new line, which a shell makes hard to type."""
    return text.replace("\\n", "\n")


_SHARED_KEYS = "acceptance=exact|typical epsilon=0.09 delta=0.3 attention=auto|mlx|fused"
"""What --drafter takes for every drafter, as `ListedDrafter.keys` are written."""

_PENALTIES = ("repetition", "presence", "frequency")
_LEGEND = """\
schedule: streams of the accepted node alone, in a pass after the tree's, or of every node in it;
head: weights of the LM head's copy that guesses; attention: the fused Metal kernel, or never (mlx);
acceptance=typical: LOSSY, accept what the model finds likely enough (Medusa)"""


@dataclass(frozen=True)
class DrafterOption:
    """What --drafter says: a drafter's name, and values by key."""

    name: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def draft_head(self) -> str:
        """As `ssmlx.load` takes it."""
        return self.values.get("head", DRAFT_HEADS[0])

    @property
    def attention(self) -> Attention:
        """As `metal.use` takes it."""
        return self.values.get("attention", ATTENTIONS[0])


class _ParseDrafter(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, drafter_option(values))


def drafter_option(text: str) -> DrafterOption:
    """What the value of --drafter says, such as "lookahead window=7"."""
    name, *words = _split("--drafter", text) or [""]
    check_choice("--drafter", name, tuple(DRAFTERS))
    keys = f"{DRAFTERS[name].keys} {_SHARED_KEYS}".split()
    values = _pairs(f"--drafter {name}", words, keys)
    if values.get("acceptance") != "typical":
        for key in {"epsilon", "delta"} & set(values):
            _refuse(f"{key}=", "acceptance=typical beside it")
    return DrafterOption(name, values)


def _drafter_settings(option: DrafterOption) -> dict[str, Any]:
    """The fields of `GenerateConfig` that --drafter sets."""
    if option.name is None:
        return {}
    from ..drafters.registry import registered_drafter

    values = option.values
    drafter = registered_drafter(option.name)
    found = {name: values[key] for key, name in drafter.config_keys.items() if key in values}
    if drafter.settings is not None:
        found[drafter.config_field] = _of_keys(drafter.settings, values)
    acceptance = _of_keys(AcceptanceConfig, values)
    return {"drafter": option.name, "acceptance": acceptance, **found}


def _of_keys(settings: type, values: Mapping[str, Any]) -> Any:
    """An object of a settings class, of the `values` by key that are its fields' options."""
    known: dict[str, str] = {}
    for one in fields(settings):
        if "allowed" in one.metadata:
            known[one.metadata["allowed"].option.partition("=")[0]] = one.name
    return settings(**{known[key]: value for key, value in values.items() if key in known})


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} ({error})", expected="words", do="close the quotation mark"
        ) from error


def _pairs(option: str, words: Sequence[str], shown: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` words, each key once and one of those that are `shown`.

    What is shown behind a key says what its values are: "a|b" one of these words, "N" or "16" a
    whole number, "X", "P" or "0.3" a number, "N,N,..." several, "MODEL" or "FOLDER" a name.
    """
    found: dict[str, Any] = {}
    known = dict(one.split("=") for one in shown)
    for word in words:
        key, _, value = word.partition("=")
        require(
            key in known and value != "" and key not in found,
            f"{option} {word}",
            expected=f"keys of {option}, each once: {' '.join(shown)}",
            do="correct or drop it",
        )
        found[key] = _value(f"{option} {word}", known[key], value)
    return found


def _value(found: str, shown: str, text: str) -> Any:
    if "|" in shown:
        words = shown.split("|")
        require(text in words, found, expected=f"one of {shown}", do="choose one of them")
        return text
    if shown in ("MODEL", "FOLDER"):
        # In quotes, no shell does it.
        return str(Path(text).expanduser()) if text.startswith("~") else text
    is_whole = shown == "N" or shown.isdigit()
    expected = "a whole number" if is_whole else "a number"
    if shown == "N,N,...":
        expected = "whole numbers with commas between"
    try:
        if shown == "N,N,...":
            return tuple(int(one) for one in text.split(","))
        return int(text) if is_whole else float(text)
    except ValueError:
        raise InputError(found, expected=expected, do="correct it") from None


# --- The options of a model, and of how it decodes; those that another one makes meaningless have
# no default, so that they can be refused ---


def add_model_options(parser: argparse.ArgumentParser, adapters: Any = str) -> None:
    """Which model and adapter to load. Of type `list`, there may be several adapters."""
    bundled = ", ".join(bundled_adapters()) or "none in this installation"
    add_options(
        parser.add_argument_group("model"),
        (
            "--model",
            "MODEL",
            "a folder (mlx-lm or Hugging Face layout), a Hub name such as "
            "org/name or org/name@revision, or an alias (default: %(default)s)",
            DEFAULT_MODEL,
        ),
        (
            "--adapter",
            "ADAPTER",
            "streams that draft, and LoRA, also mlx-lm's or PEFT's: one that ships "
            f"({bundled}), a folder, org/name or org/name@revision of the Hub, or none "
            f"(default: auto, its own, one made here for it, or {DEFAULT_ADAPTER})",
            adapters,
        ),
        (
            "--dtype",
            "TYPE",
            "stored, or the weights unpacked and cast to float32, float16 or "
            "bfloat16 (default: auto, as stored on a GPU and float32 on the CPU)",
            DTYPES[0],
            DTYPES,
        ),
    )


def add_decoding_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("decoding")
    add_options(
        group,
        (
            "--decoding",
            "HOW",
            "streaming: verify what a drafter proposes; plain: a token a pass "
            "(default: what should be faster, decided from call to call)",
            str,
            DECODINGS,
        ),
        ("--max-tokens", "N", "longest answer (default: %(default)s)", max_tokens),
        (
            "--template-args",
            "JSON",
            "what else the chat template reads, such as '{\"enable_thinking\": false}'",
            _json_object,
        ),
    )
    group.add_argument(
        "--stop",
        type=template_text,
        action="append",
        metavar="TEXT",
        help="ends the answer, and is not in it; \\n for a new line; repeatable",
    )
    group = parser.add_argument_group("sampling (exact with every drafter)")
    add_options(
        group,
        ("--temp", "T", "temperature; 0 is greedy (default: 0)", 0.0),
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
        ("--seed", "N", "repeats an answer, plain or streaming, with any drafter, in float32", int),
        (
            "--penalty",
            "NAME=X",
            'repetition=X, presence=X or frequency=X; "repetition=1.2 '
            f'context=64" looks at 64 recent tokens (default: {_DEFAULTS.repetition_context_size}'
            "); repeatable",
            list,
        ),
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="the same calls each time: nothing learned decides what is drafted, and seed 0",
    )
    group.add_argument(
        "--logit-bias",
        type=_token_bias,
        action="append",
        metavar="ID=X",
        help="add X to the logit of the token with this id; repeatable",
    )
    add_drafting_options(parser)


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    with suppress(ValueError):
        return int(token), float(bias)
    raise argparse.ArgumentTypeError(f"{quoted(text)} is not ID=X, a token's id and a number")


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    keys = {name: listed.keys for name, listed in DRAFTERS.items()}
    rows = [
        f"  {name:15} {'  '.join(own.split())}"
        for name, own in {**keys, "any of them": _SHARED_KEYS}.items()
    ]
    title = "What drafts, and its own settings with their defaults:"
    group = parser.add_argument_group(
        "drafting (streaming only)", "\n".join([title, *rows, _LEGEND])
    )
    group.add_argument(
        "--drafter",
        action=_ParseDrafter,
        default=DrafterOption(),
        metavar='"NAME ..."',
        help='such as "lookahead window=7" (default: streams, where there are any)',
    )
    text = "Without these, and without --decoding, a controller decides by what calls cost here."
    add_tree_options(parser.add_argument_group("draft tree", text))


def add_tree_options(group: argparse._ArgumentGroup) -> None:
    tree = TreeConfig()
    prune = PruneConfig()
    add_options(
        group,
        (
            "--num-streams",
            "G",
            "tokens that streams draft ahead (default: all that were trained)",
            int,
        ),
        (
            "--tree",
            None,
            "of streams and Medusa heads. full: every combination of K children a "
            "level; best: the N likeliest nodes (default: best)",
            str,
            ("full", "best"),
        ),
        (
            "--tree-width",
            "K",
            f"children a level (default: {tree.full_width} for full, no limit for best)",
            int,
        ),
        (
            "--tree-size",
            "N",
            f"nodes of the best tree, the root included (default: {tree.size})",
            int,
        ),
        (
            "--prune",
            "HOW",
            "drop unlikely nodes before the upper layers, by early exit: budget "
            "keeps the M likeliest, threshold=P those with a probability of P given their parent "
            f"(default: off; P: {prune.threshold})",
            str,
        ),
        ("--prune-to", "M", f"nodes that a budget keeps (default: {prune.keep})", int),
    )


def add_options(group: argparse._ActionsContainer, *rows: tuple[Any, ...]) -> None:
    """Options: (flag, a word for its value, help, default or else type, and the values if it is
    one of a few) each; `bool` takes no value, a list several, and `list` stands for an option that
    may be repeated."""
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
    """The settings that the options ask for; a command need not have every option."""
    drafter: DrafterOption = getattr(args, "drafter", DrafterOption())
    prune, has_threshold, _ = (getattr(args, "prune", None) or "").partition("=")
    _reject_idle_options(args, drafter.name, prune)
    tree = _taken(args, kind="tree", width="tree_width", size="tree_size")
    pruning = {**({"kind": prune} if prune else {}), **_taken(args, keep="prune_to")}
    if has_threshold:
        pruning |= _pairs("--prune", [args.prune], ["threshold=P"])
    bias = getattr(args, "logit_bias", None)
    names = ("decoding", "max_tokens", "stop", "num_streams", "temp", *_CHANCE_OPTIONS)
    return GenerateConfig(
        tree=TreeConfig(**tree) if tree else None,
        prune=PruneConfig(**pruning) if pruning else None,
        logit_bias=dict(bias) if bias else None,
        **_drafter_settings(drafter),
        **_penalties(getattr(args, "penalty", None) or ()),
        **_taken(args, **{name: name for name in (*names, "logprobs", "deterministic")}),
    )


def _taken(args: argparse.Namespace, **sources: str) -> dict[str, Any]:
    found = {name: getattr(args, source, None) for name, source in sources.items()}
    return {name: value for name, value in found.items() if value is not None}


def _penalties(texts: Iterable[str]) -> dict[str, Any]:
    """The settings of --penalty; what one text says of the context holds for its penalties."""
    settings: dict[str, Any] = {}
    shown = [*(f"{name}=X" for name in _PENALTIES), "context=N"]
    for text in texts:
        given = _pairs("--penalty", _split("--penalty", text), shown)
        context = given.pop("context", None)
        if not given:
            _refuse(f"--penalty {text}", "repetition=X, presence=X or frequency=X in it")
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
    """An option that could change nothing is a mistake, not a no-op."""
    if getattr(args, "decoding", None) == "plain":
        if drafter is not None:
            _refuse("--drafter", "streaming decoding")
        reject(args, _SHAPE_OPTIONS, "streaming decoding")
    for option, name in _SHAPE_OPTIONS.items():
        if drafter is not None and getattr(args, option, None) is not None:
            able = _drafters_shaped_by(name)
            if drafter not in able:
                reject(args, (option,), "--drafter " + " or ".join(able))
    if getattr(args, "tree", None) == "full":
        reject(args, ("tree_size",), "--tree best")
    if prune != "budget":
        reject(args, ("prune_to",), "--prune budget")
    if getattr(args, "deterministic", None):
        reject(args, ("prompt_cache",), "no --deterministic")
    if not getattr(args, "temp", 0.0):
        reject(args, _CHANCE_OPTIONS, "--temp above 0")


def _drafters_shaped_by(name: str) -> list[str]:
    """The drafters whose trees a field of `GenerateConfig` shapes: tree, num_streams or prune."""
    from ..drafters.registry import registered_drafter

    return [one for one in DRAFTERS if name in registered_drafter(one).shaped_by]


def reject(args: argparse.Namespace, names: Iterable[str], needs: str) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            _refuse("--" + name.replace("_", "-"), needs)


def _refuse(option: str, needs: str) -> NoReturn:
    raise InputError(f"{option} would do nothing here", expected=needs, do=f"drop {option}")


def load_all(args: argparse.Namespace) -> tuple[Any, Any, list[Any]]:
    """Model, tokenizer, and what is loaded to draft with, as `ssmlx.stream_generate` takes them.

    Where something else than streams is to draft, no adapter is looked for.
    """
    from ..model.ranks import launched_group

    drafter: DrafterOption = args.drafter
    group = launched_group()
    if group is not None and getattr(args, "prompt_cache", None) is not None:
        _refuse("--prompt-cache", "a model that is not split over processes")
    model, tokenizer = load_target(
        args,
        finds_adapter=drafter.name in (None, "streams"),
        draft_head=drafter.draft_head,
        attention=drafter.attention,
        group=group,
    )
    if model.num_streams == 0:
        streams = "a model with streams, that is an --adapter with some"
        reject(args, ("num_streams", *_PRUNE_OPTIONS), streams)
        if drafter.name is None or drafter.name == "streams":
            others = [one for one in _drafters_shaped_by("tree") if one != "streams"]
            reject(args, _TREE_OPTIONS, f"{streams}, or --drafter {' or '.join(others)}")
    return model, tokenizer, load_drafter(args, model, tokenizer)


def load_drafter(args: argparse.Namespace, model: Any, tokenizer: Any) -> list[Any]:
    """What --drafter names to draft with, for `drafter=` of `ssmlx.stream_generate`."""
    from ..drafters.registry import registered_drafter

    drafter: DrafterOption = args.drafter
    weights = registered_drafter(drafter.name).weights if drafter.name else None
    key = weights.key.partition("=")[0] if weights else ""
    if weights is None or key not in drafter.values:
        return []
    how = {"dtype": args.dtype, "progress": DownloadBar()}
    return [weights.load(drafter.values[key], model, tokenizer, **how)]


def load_target(
    args: argparse.Namespace,
    *,
    finds_adapter: bool = True,
    draft_head: str = DRAFT_HEADS[0],
    attention: Attention = ATTENTIONS[0],
    group: Any = None,
) -> tuple[Any, Any]:
    """The model and tokenizer that the options of `add_model_options` name.

    Where no adapter is named, the model has its own streams, or else what
    `loading.attach.default_adapter` finds, if `finds_adapter`. `args.adapter` then names it; it is
    "none" where the model is the base alone, and None for the model's own streams.
    """
    from ..loading.attach import default_adapter, swap_adapter
    from ..loading.load import load
    from ..model import metal

    if args.adapter == AUTO_ADAPTER:
        args.adapter = None
    metal.use(attention)
    model, tokenizer = load(
        args.model,
        adapter=args.adapter,
        dtype=args.dtype,
        draft_head=draft_head,
        progress=DownloadBar(),
        group=group,
    )
    if args.adapter is None and model.config is None:
        args.adapter, folder = NO_ADAPTER, None
        if finds_adapter:
            args.adapter, folder = default_adapter(model) or (NO_ADAPTER, None)
        if folder is not None:
            model = swap_adapter(model, folder)
    return model, tokenizer


def launched_rank() -> int:
    """Which of `mlx.launch`'s processes this is; the first one shows and writes for all."""
    return int(os.environ.get("MLX_RANK", "0"))


@contextmanager
def first_shows() -> Iterator[None]:
    """Show nothing inside the block, but in the first process."""
    if launched_rank() == 0:
        yield
        return
    with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
        yield


@contextmanager
def on_screen() -> Iterator[None]:
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


def run(main: Callable[[], int | None], prog: str) -> int:
    """Run a command: exit code 2 and one line for bad input, 130 for Ctrl-C."""
    if rank := launched_rank():
        prog += f" (rank {rank})"
    try:
        with _open_streams(), first_shows(), on_screen():
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
        _drop_output()
        return 0
    except (InputError, OSError) as error:  # a full disk, a name that is too long, ...
        told = os_fault(error) if isinstance(error, OSError) else error
        print(f"{prog}: error: {told}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()
        return 2


def os_fault(error: OSError) -> InputError:
    place = error.filename or "standard output"
    return InputError(
        f"{place}: {error.strerror or error}",
        expected="files that can be read and written, and room for them",
        do="choose another place",
    )


@contextmanager
def _open_streams() -> Iterator[None]:
    """Standard streams that are open, for Python has none for those that a shell closed, and that
    take any text: a character that is not in their encoding is written as its number."""
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
    """Print a value as one line of JSON, in ASCII alone where standard output is not UTF-8."""
    encoding = sys.stdout.encoding or "utf-8"  # text that stays in memory has none
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    print(json.dumps(value, ensure_ascii=not is_utf8), flush=True)


def _drop_output() -> None:
    """What cannot be written is not tried again when Python ends."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def command(
    prog: str,
    parse: Callable[[list[str] | None], argparse.Namespace],
    act: Callable[[argparse.Namespace], int | None],
) -> Callable[..., int]:
    """The `main` of a command: it takes a command line (the process's own by default), has
    `act` do what that says, and returns the exit code."""

    def main(argv: list[str] | None = None) -> int:
        return run(lambda: act(parse(argv)), prog)

    return main


def alone(
    act: Callable[[argparse.Namespace], int | None],
) -> Callable[[argparse.Namespace], int | None]:
    """What a command does, with the folder --out held meanwhile: it may have just one run."""

    def held(args: argparse.Namespace) -> int | None:
        from ..loading.files import alone_in

        with alone_in(args.out):
            return act(args)

    return held


class CallbackBar:
    """A bar for what takes a while: appears after two seconds, and leaves when done."""

    def __init__(self, label: str, unit: str, **settings: Any) -> None:
        self._settings = {"desc": label, "unit": unit, "leave": False, **settings}
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Told (how many are done, how many there are)."""
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
