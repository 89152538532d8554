"""The options that every command shares, and how a command fails.

Light on purpose: `--help` must not wait for MLX.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

from ..errors import InputError, check_choice
from ..loading.names import bundled_adapters
from ..settings import (
    ACCEPTANCES,
    ATTENTIONS,
    DECODINGS,
    DEFAULT_MODEL,
    DRAFT_HEADS,
    DRAFTERS,
    DTYPES,
    STREAM_SCHEDULES,
    Attention,
    GenerateConfig,
    PruneConfig,
    TreeConfig,
)

Item = TypeVar("Item")
_DEFAULTS = GenerateConfig()
_PATIENCE_SECONDS = 1.0


class Parser(argparse.ArgumentParser):
    """An argument parser that tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(module: str, description: str, epilog: str, usage: str | None = None) -> Parser:
    """A parser for `python -m <module>`; `usage` is what follows that, where it is short."""
    return Parser(
        prog=f"python -m {module}",
        usage=f"python -m {module} {usage}" if usage else None,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_counts(
    parser: argparse._ActionsContainer, *rows: tuple[str, int, str], metavar: str | None = None
) -> None:
    """Options that are whole numbers: (name without dashes, default, what it is) each."""
    for name, default, text in rows:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar=metavar,
            help=f"{text} (default: %(default)s)",
        )  # fmt: skip


def template_text(text: str) -> str:
    """What --template stands for: `\\n` in it is a new line, which a shell makes hard to type."""
    return text.replace("\\n", "\n")


# --- What a drafter is told, by `--drafter "NAME KEY=VALUE ..."` ---

_KEYS = {
    "streams": {
        "schedule": "stream_schedule",
        "lookup": "lookup_nodes",
        "head": "draft_head",
    },
    "prompt-lookup": {
        "ngram": "prompt_lookup.ngram",
        "tokens": "prompt_lookup.num_draft_tokens",
        "size": "prompt_lookup.size",
    },
    "lookahead": {
        "window": "lookahead.window",
        "ngram": "lookahead.ngram",
        "guesses": "lookahead.guesses",
    },
    "draft-model": {
        "model": "draft_model",
        "tokens": "draft.num_draft_tokens",
        "width": "draft.width",
    },
    "medusa": {"heads": "heads", "lookup": "lookup_nodes"},
    "mlp-speculator": {
        "heads": "heads",
        "widths": "speculator_tree.widths",
        "candidates": "speculator_tree.candidates",
        "size": "speculator_tree.size",
        "lookup": "lookup_nodes",
    },
}
"""Each drafter's own keys, and where their values go: in `GenerateConfig`, or what is loaded."""

_EVERY_DRAFTERS = {
    "acceptance": "acceptance.kind",
    "epsilon": "acceptance.epsilon",
    "delta": "acceptance.delta",
    "attention": "attention",
}
_PENALTIES = ("repetition", "presence", "frequency")
_WORDS = {
    "schedule": "|".join(reversed(STREAM_SCHEDULES)),
    "head": "|".join(DRAFT_HEADS),
    "model": "MODEL",
    "heads": "FOLDER",
    "acceptance": "|".join(ACCEPTANCES),
    "attention": "|".join(ATTENTIONS),
}
"""Keys whose values are words, and what they may be; all others are numbers."""
_FRACTIONS = ("epsilon", "delta", *_PENALTIES)


@dataclass(frozen=True, kw_only=True)
class DrafterOption:
    """What --drafter says.

    Attributes:
        kind: what drafts; None leaves it to the model.
        settings: fields of `GenerateConfig`.
        draft_model, heads: what it drafts with, a model's name and a folder.
        draft_head, attention: as `ssmlx.load` and `ssmlx.model.metal.use` take them.
    """

    kind: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft_model: str | None = None
    heads: str | None = None
    draft_head: str = DRAFT_HEADS[0]
    attention: Attention = ATTENTIONS[0]


_LOADED = ("draft_model", "heads", "draft_head", "attention")


def drafter_option(text: str | None) -> DrafterOption:
    """What the text of --drafter says.

    Raises:
        InputError: the drafter is unknown, or a key is not its own, or a value is none.
    """
    if text is None:
        return DrafterOption()
    kind, *words = _split("--drafter", text) or [""]
    check_choice("--drafter", kind, DRAFTERS)
    places = {**_KEYS[kind], **_EVERY_DRAFTERS}
    given = _pairs(f"--drafter {kind}", words, [_shown(key, at) for key, at in places.items()])
    if given.get("acceptance") != "typical":
        for key in {"epsilon", "delta"} & set(given):
            _refuse(f"{key}=", "acceptance=typical beside it")
    loaded: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in given.items():
        place, _, inner = places[key].partition(".")
        if place in _LOADED:
            loaded[place] = value
        elif inner:
            before = settings.get(place, getattr(_DEFAULTS, place))
            settings[place] = replace(before, **{inner: value})
        else:
            settings[place] = value
    return DrafterOption(kind=kind, settings=settings, **loaded)


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} ({error})", expected="words", do="close the quotation mark"
        ) from error


def _shown(key: str, place: str) -> str:
    """A key with its default, or with what it may be."""
    if key in _WORDS:
        return f"{key}={_WORDS[key]}"
    value = attrgetter(place)(_DEFAULTS)
    return f"{key}={'N,N,...' if key == 'widths' else 'N' if value is None else value}"


def _pairs(option: str, words: Sequence[str], shown: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` words, each key once and one of those that are `shown`."""
    known, found = [one.partition("=")[0] for one in shown], {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in known or not value or key in found:
            raise InputError(
                f"{option} {word}",
                expected=f"keys of {option}, each once: {' '.join(shown)}",
                do="correct or drop it",
            )
        found[key] = _value(f"{option} {word}", key, value)
    return found


def _value(told: str, key: str, text: str) -> Any:
    if key in _WORDS:
        known = _WORDS[key].split("|")
        if len(known) > 1 and text not in known:
            raise InputError(told, expected=_WORDS[key], do="choose one of them")
        return text
    try:
        if key == "widths":
            return tuple(int(one) for one in text.split(","))
        return float(text) if key in _FRACTIONS else int(text)
    except ValueError:
        kind = "a number" if key in _FRACTIONS else "a whole number"
        expected = "whole numbers with commas between" if key == "widths" else kind
        raise InputError(told, expected=expected, do="correct it") from None


def _drafter_help() -> str:
    rows = [
        f"  {name:15} {'  '.join(_shown(key, place) for key, place in keys.items())}"
        for name, keys in {**_KEYS, "any of them": _EVERY_DRAFTERS}.items()
    ]
    return "\n".join(["What drafts, and its own settings with their defaults:", *rows, _LEGEND])


_LEGEND = """\
schedule: streams of the accepted node alone, in a pass after the tree's, or of every node in it;
lookup: nodes beside the tree, for what followed the same words earlier in the text; head: weights
of the LM head's copy that guesses; attention: the fused Metal kernel, or never (mlx);
acceptance=typical: LOSSY, accept what the model finds likely enough (Medusa)"""


# --- The options of a model, and of how it decodes ---


def add_model_options(parser: argparse.ArgumentParser, default_adapter: str | None = None) -> None:
    """Which model and adapter to load.

    Args:
        parser: where the options go.
        default_adapter: what is taken where none is named, for the help.
    """
    bundled = ", ".join(bundled_adapters()) or "none in this installation"
    default = f"{default_adapter}, where it belongs to the model" if default_adapter else "none"
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default=DEFAULT_MODEL,
        help="a folder (mlx-lm or Hugging Face layout), a Hub name such as org/name or "
        "org/name@revision, or an alias (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--adapter", metavar="NAME|FOLDER",
        help=f"the streams that draft, and LoRA: one that ships with ssmlx ({bundled}), a folder "
        f"that was trained, or none; a fused model brings its own (default: {default})",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="weights as stored, or unpacked and cast; auto: as stored on a GPU, float32 on "
        "the CPU",
    )  # fmt: skip


def add_decoding_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How to decode. Options that another one makes meaningless have no default, see below."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--decoding", choices=DECODINGS,
        help="streaming: verify what a drafter proposes, the same answer in fewer forward passes; "
        "plain: a token a pass (default: streaming with an adapter or a drafter, unless "
        "`python -m ssmlx.calibrate` found plain decoding faster here)",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help="longest answer (default: %(default)s)",
    )  # fmt: skip
    _add_sampling_options(parser.add_argument_group("sampling (exact with every drafter)"))
    add_drafting_options(parser)


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """What drafts, and what its trees are."""
    group = parser.add_argument_group("drafting (streaming only)", _drafter_help())
    group.add_argument(
        "--drafter", metavar='"NAME KEY=VALUE ..."',
        help='such as "lookahead window=7" (default: streams, where there are any)',
    )  # fmt: skip
    add_tree_options(
        parser.add_argument_group(
            "draft tree",
            "Without these, streams draft as `python -m ssmlx.calibrate` found fastest here, if it "
            "was run.",
        )
    )


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    """How the target decides on tokens: mlx-lm's names."""
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="T", help="temperature; 0 is greedy (default: 0)"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P",
        help="sample from the likeliest tokens that together have probability P",
    )  # fmt: skip
    group.add_argument(
        "--min-p", type=float, metavar="P",
        help="sample from tokens with at least P of the likeliest one's probability",
    )  # fmt: skip
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    group.add_argument(
        "--seed", type=int, metavar="N",
        help="the same one gives the same answer plain and streaming, with any drafter, in float32",
    )  # fmt: skip
    group.add_argument(
        "--penalty", action="append", metavar="NAME=X",
        help="repetition=X divides the logits of recent tokens, presence=X and frequency=X are "
        'taken from them; "repetition=1.2 context=64" looks at 64 tokens (default: '
        f"{_DEFAULTS.repetition_context_size}); repeatable",
    )  # fmt: skip
    group.add_argument(
        "--logit-bias", type=_token_bias, action="append", metavar="TOKEN=BIAS",
        help="add BIAS to the logit of the token with this id; repeatable",
    )  # fmt: skip


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def add_tree_options(group: argparse._ArgumentGroup) -> None:
    """What to draft. Options that another one makes meaningless have no default."""
    tree, prune = TreeConfig(), PruneConfig()
    group.add_argument(
        "--num-streams", type=int, metavar="G",
        help="tokens that streams draft ahead (default: all that the adapter was trained with)",
    )  # fmt: skip
    group.add_argument(
        "--tree", choices=("full", "best"),
        help="of streams and Medusa heads. full: every combination of K children a level; best: "
        "the N likeliest nodes (default: best)",
    )  # fmt: skip
    group.add_argument(
        "--tree-width", type=int, metavar="K",
        help=f"children a level (default: {tree.full_width} for full, no limit for best)",
    )  # fmt: skip
    group.add_argument(
        "--tree-size", type=int, metavar="N",
        help=f"nodes of the best tree, the root included (default: {tree.size})",
    )  # fmt: skip
    group.add_argument(
        "--prune", metavar="off|budget|threshold[=P]",
        help="drop unlikely nodes before the upper layers, by early exit, of any drafter's tree "
        "but lookahead's: budget keeps the M likeliest, threshold those with a probability of P "
        f"given their parent (default: off; P: {prune.threshold})",
    )  # fmt: skip
    group.add_argument(
        "--prune-to", type=int, metavar="M",
        help=f"nodes that a budget keeps (default: {prune.keep})",
    )  # fmt: skip


# --- From options to settings ---

_CHANCE_OPTIONS = ("top_p", "min_p", "top_k", "seed")
_TREE_OPTIONS = ("tree", "tree_width", "tree_size")
_PRUNE_OPTIONS = ("prune", "prune_to")
_DRAFTERS_WITH = {
    "num_streams": ("streams",),
    **dict.fromkeys(_TREE_OPTIONS, ("streams", "medusa")),
    **dict.fromkeys(_PRUNE_OPTIONS, tuple(kind for kind in DRAFTERS if kind != "lookahead")),
}


def generate_config(args: argparse.Namespace) -> GenerateConfig:
    """The settings that the options ask for; a command need not have every option.

    Raises:
        InputError: a value is out of range, or an option could have no effect.
    """
    drafter = drafter_option(getattr(args, "drafter", None))
    prune, _, threshold = (getattr(args, "prune", None) or "").partition("=")
    _reject_idle_options(args, drafter.kind, prune)
    tree = _taken(args, kind="tree", width="tree_width", size="tree_size")
    pruning = {**({"kind": prune} if prune else {}), **_taken(args, keep="prune_to")}
    if threshold:
        pruning["threshold"] = _threshold(args.prune, prune, threshold)
    bias = getattr(args, "logit_bias", None)
    names = ("decoding", "max_tokens", "num_streams", "temp", *_CHANCE_OPTIONS)
    return GenerateConfig(
        drafter=drafter.kind,  # type: ignore[arg-type]
        tree=TreeConfig(**tree) if tree else None,
        prune=PruneConfig(**pruning) if pruning else None,
        logit_bias=dict(bias) if bias else None,
        **drafter.settings,
        **_penalties(getattr(args, "penalty", None) or ()),
        **_taken(args, **{name: name for name in names}),
    )


def _taken(args: argparse.Namespace, **sources: str) -> dict[str, Any]:
    """The settings whose option is given."""
    found = {name: getattr(args, source, None) for name, source in sources.items()}
    return {name: value for name, value in found.items() if value is not None}


def _threshold(given: str, kind: str, text: str) -> float:
    try:
        if kind == "threshold":
            return float(text)
    except ValueError:
        pass
    raise InputError(
        f"--prune {given}", expected="off, budget, threshold or threshold=P", do="correct it"
    )


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
            settings[f"{name}_penalty"] = value
            if context is not None:
                settings[f"{name}_context_size"] = context
    return settings


def _reject_idle_options(args: argparse.Namespace, drafter: str | None, prune: str) -> None:
    """An option that could change nothing is a mistake, not a no-op."""
    if getattr(args, "decoding", None) == "plain":
        _reject(args, ("drafter", *_DRAFTERS_WITH), "streaming decoding")
    for name, drafters in _DRAFTERS_WITH.items():
        # The model may yet turn out to have streams.
        if (drafter or "streams") not in drafters:
            _reject(args, (name,), "--drafter " + " or ".join(drafters))
    if getattr(args, "tree", None) == "full":
        _reject(args, ("tree_size",), "--tree best")
    if prune != "budget":
        _reject(args, ("prune_to",), "--prune budget")
    if not getattr(args, "temp", 0.0):
        _reject(args, _CHANCE_OPTIONS, "--temp above 0")


def _reject(args: argparse.Namespace, names: Iterable[str], needs: str) -> None:
    for name in names:
        if getattr(args, name, None) is not None:
            _refuse("--" + name.replace("_", "-"), needs)


def _refuse(option: str, needs: str) -> NoReturn:
    raise InputError(f"{option} would do nothing here", expected=needs, do=f"drop {option}")


# --- Loading what the options name ---


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a command decodes with.

    Attributes:
        model, tokenizer: as `ssmlx.load` returns them.
        config: the settings.
        drafts: the draft model or the heads, as `ssmlx.stream_generate` takes them by name.
    """

    model: Any
    tokenizer: Any
    config: GenerateConfig
    drafts: Mapping[str, Any]


def load_all(args: argparse.Namespace, default_adapter: str | None = None) -> Loaded:
    """Everything that the options of `add_model_options` and `add_decoding_options` name.

    Args:
        args: the options.
        default_adapter: as for `load_target`, where nothing else is to draft.

    Raises:
        InputError: it cannot be loaded, or does not fit together.
    """
    config, drafter = generate_config(args), drafter_option(args.drafter)
    wants_streams = drafter.kind in (None, "streams")
    model, tokenizer = load_target(
        args,
        default_adapter if wants_streams else None,
        draft_head=drafter.draft_head,
        attention=drafter.attention,
    )
    if model.num_streams == 0:
        streams = "a model with streams, that is an --adapter"
        _reject(args, ("num_streams", *_PRUNE_OPTIONS), streams)
        if drafter.kind != "medusa":
            _reject(args, _TREE_OPTIONS, f"{streams}, or --drafter medusa")
    drafts: dict[str, Any] = {}
    if drafter.draft_model is not None:
        from ..drafters.draft_model import load_draft_model

        vocab_size = model.backbone.vocab_size
        drafts["draft_model"] = load_draft_model(
            drafter.draft_model, tokenizer, vocab_size, dtype=args.dtype
        )
    if drafter.heads is not None:
        from ..drafters.heads import load_heads

        drafts["heads"] = load_heads(drafter.heads, model)
    return Loaded(model, tokenizer, config, drafts)


def load_target(
    args: argparse.Namespace,
    default_adapter: str | None = None,
    *,
    draft_head: str = DRAFT_HEADS[0],
    attention: Attention = ATTENTIONS[0],
) -> tuple[Any, Any]:
    """The model and tokenizer that the options of `add_model_options` name.

    Args:
        args: the options.
        default_adapter: a bundled adapter to use where none is named, the model brings no
            streams, and the adapter belongs to the model; `args.adapter` then names it.
        draft_head: as `ssmlx.load` takes it.
        attention: as `ssmlx.model.metal.use` takes it.
    """
    from ..loading.attach import adapters_for, swap_adapter
    from ..loading.load import load
    from ..model import metal

    metal.use(attention)
    model, tokenizer = load(
        args.model, adapter=args.adapter, dtype=args.dtype, draft_head=draft_head
    )
    if args.adapter is None and default_adapter and model.num_streams == 0:
        folder = adapters_for(model).get(default_adapter)
        if folder is not None:
            model = swap_adapter(model, folder)
            args.adapter = default_adapter
    return model, tokenizer


# --- Running ---


def run(main: Callable[[], int | None], prog: str) -> int:
    """Run a command: exit code 2 and one line for bad input, 130 for Ctrl-C."""
    try:
        return main() or 0
    except InputError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def bar(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """`items` with a bar of `total` steps, shown on a terminal only."""
    from huggingface_hub.utils import tqdm

    return iter(tqdm(items, total=total, desc=label, unit="prompt", disable=None, leave=False))


class PromptBar:
    """A bar for a prompt that takes a while: appears after a second, and leaves when done."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Told (tokens processed, tokens in all)."""
        from huggingface_hub.utils import tqdm

        if self._started is None or done == 0:
            self._started = time.perf_counter()
        late = time.perf_counter() - self._started > _PATIENCE_SECONDS
        if self._bar is None and late and done < total:
            self._bar = tqdm(total=total, desc="prompt", unit="token", disable=None, leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._bar.close()
                self._bar = None
