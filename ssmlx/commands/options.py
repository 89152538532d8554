"""The options that every command shares, and how a command fails.

Light on purpose: `--help` must not wait for MLX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import InputError
from ..loading.names import bundled_adapters
from ..settings import (
    ACCEPTANCES,
    ATTENTIONS,
    DECODINGS,
    DEFAULT_MODEL,
    DRAFT_HEADS,
    DRAFTERS,
    DTYPES,
    HEAD_DRAFTERS,
    STREAM_SCHEDULES,
    AcceptanceConfig,
    DraftModelConfig,
    GenerateConfig,
    LookaheadConfig,
    PromptLookupConfig,
    PruneConfig,
    SamplingConfig,
    SpeculatorTreeConfig,
    TreeConfig,
)


class Parser(argparse.ArgumentParser):
    """An argument parser that tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(module: str, description: str, epilog: str) -> Parser:
    """A parser for `python -m <module>`."""
    return Parser(
        prog=f"python -m {module}",
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


def add_model_options(parser: argparse.ArgumentParser, default_adapter: str | None = None) -> None:
    """Which model and adapter to load.

    Args:
        parser: where the options go.
        default_adapter: what `load_from` will be given, for the help.
    """
    bundled = ", ".join(bundled_adapters()) or "none in this installation"
    default = f"{default_adapter}, where it belongs to the model" if default_adapter else "none"
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a local folder (mlx-lm or Hugging Face layout), a Hub name such as "
        "org/name or org/name@revision, or an alias (default: %(default)s)",
    )
    group.add_argument(
        "--adapter",
        metavar="NAME|FOLDER",
        help="the streams that draft, and LoRA: a folder that `python -m convert` wrote, or the "
        f"name of an adapter that ships with ssmlx ({bundled}); `none` decodes plainly. A folder "
        f"in the working directory comes before a name (default: {default}; a fused model folder "
        "brings its own)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="weights as stored, or unpacked and cast; auto: as stored on a GPU, float32 on "
        "the CPU (default: %(default)s)",
    )
    group.add_argument(
        "--draft-head",
        choices=DRAFT_HEADS,
        default=DRAFT_HEADS[0],
        help="weights of the LM head's copy that guesses among the adapter's draft vocabulary: as "
        "stored, or packed to 8 bits, which takes less memory and changes no answer; auto: packed "
        "on a GPU (default: %(default)s)",
    )
    group.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default=ATTENTIONS[0],
        help="what computes the attention of tree and stream rows: auto, the fused Metal kernel "
        "where it should pay; mlx, never; fused, wherever it can (default: %(default)s)",
    )


def add_decoding_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How to decode. Options that another one makes meaningless have no default, see below."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--decoding",
        choices=DECODINGS,
        help="streaming: verify what a drafter proposes, same answer in fewer forward passes; "
        "plain: one token a pass (default: streaming with an adapter or a drafter, unless "
        "`python -m ssmlx.calibrate` found plain decoding faster on this machine; else plain)",
    )
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="longest answer (default: %(default)s)"
    )
    add_sampling_options(parser.add_argument_group("sampling (exact with every drafter)"))
    add_drafter_options(parser.add_argument_group("drafting (streaming only)"))
    add_head_options(parser.add_argument_group("drafting heads (streaming only)"))
    add_tree_options(
        parser.add_argument_group(
            "draft tree (streams and Medusa heads; --prune: most drafters)",
            "With none of these options, streams draft as `python -m ssmlx.calibrate` found to be\n"
            "fastest on this machine, if it was run; else by the defaults.",
        )
    )


def template_text(text: str) -> str:
    """What --template stands for: `\\n` in it is a new line, which a shell makes hard to type."""
    return text.replace("\\n", "\n")


def add_sampling_options(group: argparse._ArgumentGroup) -> None:
    """How the target decides on tokens: mlx-lm's names."""
    group.add_argument(
        "--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P",
        help="sample from the likeliest tokens that together have probability P (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--min-p", type=float, metavar="P",
        help="sample from tokens with at least P of the likeliest one's probability "
        "(default: all)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", type=int, metavar="K",
        help="sample from the K likeliest tokens (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int,
        help="seed of the sampler; the same one gives the same answer plain and streaming, with "
        "any drafter, in float32 (default: a new one each run)",
    )  # fmt: skip
    default = SamplingConfig().repetition_context_size
    for name, what in (
        ("repetition", "divides the logits of recent tokens (above 1 discourages them)"),
        ("presence", "taken from the logits of recent tokens"),
        ("frequency", "taken from a recent token's logit once for every time it stands there"),
    ):
        group.add_argument(
            f"--{name}-penalty", type=float, metavar="X", help=f"{what} (default: none)"
        )
        group.add_argument(
            f"--{name}-context-size", type=int, metavar="N",
            help=f"recent tokens that --{name}-penalty looks at (default: {default})",
        )  # fmt: skip
    group.add_argument(
        "--logit-bias", type=_token_bias, action="append", metavar="TOKEN=BIAS",
        help="add BIAS to the logit of the token with this id; may be given several times",
    )  # fmt: skip


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def add_drafter_options(group: argparse._ArgumentGroup) -> None:
    """What drafts. Options that another one makes meaningless have no default."""
    lookup, lookahead, draft = PromptLookupConfig(), LookaheadConfig(), DraftModelConfig()
    group.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="streams: the adapter's; prompt-lookup: what followed the last tokens where they "
        "stood before; lookahead: Jacobi iterations and their n-grams; draft-model: a smaller "
        "model; medusa and mlp-speculator: small trained heads (default: draft-model with "
        "--draft-model, what the heads are with --heads, else streams with an adapter)",
    )
    group.add_argument(
        "--draft-model", metavar="MODEL",
        help="a model with the same vocabulary, named as for --model",
    )  # fmt: skip
    group.add_argument(
        "--num-draft-tokens", type=int, metavar="K",
        help="tokens to draft ahead, for prompt-lookup and draft-model "
        f"(default: {lookup.num_draft_tokens} and {draft.num_draft_tokens})",
    )  # fmt: skip
    group.add_argument(
        "--draft-width", type=int, metavar="N",
        help="the draft model's candidates a level; those beside its first are leaves "
        f"(default: {draft.width}, a chain)",
    )  # fmt: skip
    group.add_argument(
        "--lookup-ngram", type=int, metavar="N",
        help=f"most tokens that prompt-lookup looks up (default: {lookup.ngram})",
    )  # fmt: skip
    group.add_argument(
        "--lookup-size", type=int, metavar="N",
        help=f"nodes of prompt-lookup's tree (default: {lookup.size})",
    )  # fmt: skip
    group.add_argument(
        "--lookahead-window", type=int, metavar="W",
        help=f"guesses that an iteration improves at once (default: {lookahead.window})",
    )  # fmt: skip
    group.add_argument(
        "--lookahead-ngram", type=int, metavar="N",
        help=f"tokens of an n-gram, the first one included (default: {lookahead.ngram})",
    )  # fmt: skip
    group.add_argument(
        "--lookahead-guesses", type=int, metavar="G",
        help=f"n-grams to verify a step, at most (default: {lookahead.guesses})",
    )  # fmt: skip
    group.add_argument(
        "--acceptance",
        choices=ACCEPTANCES,
        help="exact: the answer is distributed as the target's own; typical: LOSSY, accept what "
        "the target finds likely enough (Medusa), so the answer is not the target's "
        "(default: exact)",
    )
    typical = AcceptanceConfig()
    group.add_argument(
        "--typical-epsilon", type=float, metavar="P",
        help=f"LOSSY: probability that is always enough (default: {typical.epsilon})",
    )  # fmt: skip
    group.add_argument(
        "--typical-delta", type=float, metavar="X",
        help="LOSSY: X * exp(-entropy) is enough where that is less "
        f"(default: {typical.delta})",
    )  # fmt: skip


def add_head_options(group: argparse._ArgumentGroup) -> None:
    """Which heads draft, and what. Options that another one makes meaningless have no default."""
    group.add_argument(
        "--heads",
        metavar="FOLDER",
        help="Medusa heads, each of which guesses a token further ahead, or an MLP speculator, "
        "whose stages also see their own last guess; both start from the model's newest hidden "
        "state, so they fit the model that they were trained on, with the same LoRA if it had "
        "one. A folder that `python -m convert --heads` wrote",
    )
    group.add_argument(
        "--speculator-widths", type=int, nargs="+", metavar="N",
        help="the MLP speculator's guesses at each stage, for every guess of the stage before; "
        "fewer numbers use fewer stages (default: as it was published)",
    )  # fmt: skip
    group.add_argument(
        "--speculator-candidates", type=int, metavar="K",
        help="keep the K likeliest of its whole paths, and what they pass through "
        "(default: as it was published)",
    )  # fmt: skip
    group.add_argument(
        "--speculator-size", type=int, metavar="N",
        help="keep its N likeliest nodes instead, whole paths or not, the root included",
    )  # fmt: skip


def add_tree_options(group: argparse._ArgumentGroup) -> None:
    """What to draft. Options that another one makes meaningless have no default."""
    group.add_argument(
        "--num-streams",
        type=int,
        metavar="G",
        help="tokens that streams draft ahead, no more than the adapter was trained with "
        "(default: all)",
    )
    group.add_argument(
        "--stream-schedule",
        choices=STREAM_SCHEDULES,
        help="second-pass: streams of the accepted node alone, in a pass of the upper layers after "
        "the tree is verified; fused: of every node while it is verified, as in the paper, with "
        f"more rows and no second reading of weights (default: {STREAM_SCHEDULES[1]})",
    )
    group.add_argument(
        "--tree",
        choices=("full", "best"),
        help="full: every combination of K children a level, 1 + K + ... + K^G nodes; best: the "
        "N likeliest nodes (default: best)",
    )
    group.add_argument(
        "--tree-width",
        type=int,
        metavar="K",
        help="children a level (default: 3 for full, no limit for best)",
    )
    group.add_argument(
        "--tree-size",
        type=int,
        metavar="N",
        help=f"nodes of the best tree, the root included (default: {TreeConfig().size})",
    )
    group.add_argument(
        "--lookup-nodes", type=int, metavar="N",
        help="nodes beside these, for what followed the same words earlier in the text: for "
        "answers that quote their prompt (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--prune",
        choices=("off", "budget", "threshold"),
        help="drop unlikely nodes before the upper layers, by early exit: budget keeps the M "
        "likeliest, threshold those with a probability of P or more (default: off)",
    )
    group.add_argument(
        "--prune-to",
        type=int,
        metavar="M",
        help=f"nodes that a budget keeps (default: {PruneConfig().keep})",
    )
    group.add_argument(
        "--prune-threshold",
        type=float,
        metavar="P",
        help=f"least probability of a child given its parent (default: {PruneConfig().threshold})",
    )


def generate_config(args: argparse.Namespace) -> GenerateConfig:
    """The settings that the options ask for; `load_drafter` loads a draft model or heads.

    Raises:
        InputError: a value is out of range, or an option could have no effect.
    """
    _reject_idle_options(args)
    bias = getattr(args, "logit_bias", None)
    tree = _taken(args, kind="tree", width="tree_width", size="tree_size")
    prune = _taken(args, kind="prune", keep="prune_to", threshold=_THRESHOLD)
    return GenerateConfig(
        tree=TreeConfig(**tree) if tree else None,
        prune=PruneConfig(**prune) if prune else None,
        prompt_lookup=PromptLookupConfig(
            **_taken(args, ngram="lookup_ngram", size="lookup_size", num_draft_tokens=_LENGTH)
        ),
        lookahead=LookaheadConfig(
            **_taken(
                args,
                window="lookahead_window",
                ngram="lookahead_ngram",
                guesses="lookahead_guesses",
            )
        ),
        draft=DraftModelConfig(**_taken(args, num_draft_tokens=_LENGTH, width="draft_width")),
        speculator_tree=SpeculatorTreeConfig(
            **_taken(
                args,
                widths="speculator_widths",
                candidates="speculator_candidates",
                size="speculator_size",
            )
        ),
        acceptance=AcceptanceConfig(
            **_taken(args, kind="acceptance", epsilon="typical_epsilon", delta="typical_delta")
        ),
        logit_bias=dict(bias) if bias else None,
        **_taken(args, **{name: name for name in (*_SAMPLING_OPTIONS, *_OTHER_OPTIONS)}),
    )


def _taken(args: argparse.Namespace, **sources: str) -> dict[str, Any]:
    """The settings whose option is given; a command need not have every option."""
    found = {name: getattr(args, source, None) for name, source in sources.items()}
    return {name: value for name, value in found.items() if value is not None}


_THRESHOLD, _LENGTH = "prune_threshold", "num_draft_tokens"
_LOOKUP = "lookup_nodes"
_OTHER_OPTIONS = ("decoding", "max_tokens", "num_streams", "stream_schedule", "drafter", _LOOKUP)
_TREE_OPTIONS = ("tree", "tree_width", "tree_size")
_PRUNE_OPTIONS = ("prune", "prune_to", "prune_threshold")
_STREAM_OPTIONS = ("num_streams", "stream_schedule")
_ADAPTER_OPTIONS = (*_STREAM_OPTIONS, *_PRUNE_OPTIONS)
_DRAFT_OPTIONS = {
    "draft_model": ("draft-model",),
    "num_draft_tokens": ("prompt-lookup", "draft-model"),
    "draft_width": ("draft-model",),
    "lookup_ngram": ("prompt-lookup",),
    "lookup_size": ("prompt-lookup",),
    "lookahead_window": ("lookahead",),
    "lookahead_ngram": ("lookahead",),
    "lookahead_guesses": ("lookahead",),
    "heads": HEAD_DRAFTERS,
    "speculator_widths": ("mlp-speculator",),
    "speculator_candidates": ("mlp-speculator",),
    "speculator_size": ("mlp-speculator",),
    **{name: ("streams",) for name in _STREAM_OPTIONS},
    **{name: ("streams", "medusa") for name in _TREE_OPTIONS},
    _LOOKUP: ("streams", *HEAD_DRAFTERS),
    **{
        name: tuple(drafter for drafter in DRAFTERS if drafter != "lookahead")
        for name in _PRUNE_OPTIONS
    },
}
_PENALTIES = ("repetition", "presence", "frequency")
_CHANCE_OPTIONS = ("top_p", "min_p", "top_k", "seed")
_SAMPLING_OPTIONS = (
    "temp",
    *_CHANCE_OPTIONS,
    *(f"{name}_{what}" for name in _PENALTIES for what in ("penalty", "context_size")),
)
_ACCEPTANCE_OPTIONS = ("acceptance", "typical_epsilon", "typical_delta")


def _drafter_of(args: argparse.Namespace) -> str | None:
    """The drafter that the options name; None leaves it to the model.

    Raises:
        InputError: --heads names no folder of heads.
    """
    named = getattr(args, "drafter", None)
    if named is not None:
        return named
    if getattr(args, "draft_model", None) is not None:
        return "draft-model"
    if getattr(args, "heads", None) is None:
        return None
    from ..drafters.heads import read_drafter

    return read_drafter(args.heads)


def _reject_idle_options(args: argparse.Namespace) -> None:
    """An option that could change nothing is a mistake, not a no-op."""
    if args.decoding == "plain":
        names = ("drafter", *_ACCEPTANCE_OPTIONS, *_DRAFT_OPTIONS)
        _reject(args, names, "streaming decoding")
    drafter = _drafter_of(args)
    for name, drafters in _DRAFT_OPTIONS.items():
        # The model may yet turn out to have streams.
        if (drafter or "streams") not in drafters:
            _reject(args, (name,), "--drafter " + " or ".join(drafters))
    if args.tree == "full":
        _reject(args, ("tree_size",), "--tree best")
    for kind, name in (("budget", "prune_to"), ("threshold", "prune_threshold")):
        if args.prune != kind:
            _reject(args, (name,), f"--prune {kind}")
    _reject_idle_sampling(args)


def _reject_idle_sampling(args: argparse.Namespace) -> None:
    if not getattr(args, "temp", 0.0):
        _reject(args, _CHANCE_OPTIONS, "--temp above 0")
    for name in _PENALTIES:
        if not getattr(args, f"{name}_penalty", None):
            _reject(args, (f"{name}_context_size",), f"--{name}-penalty")
    if getattr(args, "acceptance", None) != "typical":
        _reject(args, _ACCEPTANCE_OPTIONS[1:], "--acceptance typical")


def _reject(args: argparse.Namespace, names: tuple[str, ...], needs: str) -> None:
    for name in names:
        if getattr(args, name, None) is not None:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} would do nothing here", expected=needs, do=f"drop {flag}")


def load_from(args: argparse.Namespace, default_adapter: str | None = None) -> Any:
    """The model and tokenizer that the options name.

    Args:
        args: the options.
        default_adapter: a bundled adapter to use where none is named, the model brings no
            streams, nothing else is to draft, and the adapter belongs to the model;
            `args.adapter` then names it.
    """
    from ..loading.attach import adapters_for, swap_adapter
    from ..loading.load import load
    from ..model import metal

    metal.use(args.attention)
    model, tokenizer = load(
        args.model, adapter=args.adapter, dtype=args.dtype, draft_head=args.draft_head
    )
    drafter = _drafter_of(args)
    wants_streams = drafter in (None, "streams")
    if args.adapter is None and default_adapter and wants_streams and model.num_streams == 0:
        folder = adapters_for(model).get(default_adapter)
        if folder is not None:
            model = swap_adapter(model, folder)
            args.adapter = default_adapter
    if model.num_streams == 0:
        _reject(args, _ADAPTER_OPTIONS, "a model with streams, that is an --adapter")
        if drafter != "medusa":
            _reject(args, _TREE_OPTIONS, "a model with streams, that is an --adapter, or --heads")
        if drafter not in HEAD_DRAFTERS:
            _reject(args, (_LOOKUP,), "a model with streams, that is an --adapter, or --heads")
        if drafter is None:
            _reject(args, _ACCEPTANCE_OPTIONS, "a drafter: an --adapter, or --drafter")
    return model, tokenizer


def load_drafter(
    args: argparse.Namespace, config: GenerateConfig, model: Any, tokenizer: Any
) -> dict[str, Any]:
    """The draft model and the heads that the options name, as `stream_generate` takes them.

    They are checked on `model`, as the settings are.

    Raises:
        InputError: they cannot be loaded, do not fit the model, or the settings do not.
    """
    from ..plan import make_plan

    loaded: dict[str, Any] = {}
    if args.draft_model is not None:
        from ..drafters.draft_model import load_draft_model

        vocab_size = model.backbone.vocab_size
        loaded["draft_model"] = load_draft_model(
            args.draft_model, tokenizer, vocab_size, dtype=args.dtype
        )
    if args.heads is not None:
        from ..drafters.heads import load_heads

        loaded["heads"] = load_heads(args.heads, model)
    make_plan(model, config, **loaded)
    return loaded


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
