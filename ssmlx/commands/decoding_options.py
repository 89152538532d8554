"""The options of a model and of how it decodes, and the settings that they come to.

Options that another one makes meaningless have no default, so that they can be refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..drafters.option import SHARED_KEYS, DrafterOption, parse_drafter_option
from ..errors import quoted, require
from ..loading.names import DEFAULT_ADAPTER, bundled_adapters
from ..pairs import parse_pairs, split_words
from ..settings import (
    DECODINGS,
    DEFAULT_MODEL,
    DRAFTERS,
    DTYPES,
    GenerateConfig,
    ModelSampling,
    PruneConfig,
    TreeConfig,
)
from .parser import (
    add_options,
    parse_json_object,
    refuse_option,
    reject_given_options,
    unescape_newlines,
)

_DEFAULTS = GenerateConfig()
_PENALTIES = ("repetition", "presence", "frequency")
_LEGEND = """\
schedule: run streams in a pass of their own (second-pass) or in the verifying one (fused).
head: weights of the draft head. attention: MLX's (mlx), or the fused Metal kernel if faster (auto).
acceptance=typical: also accept tokens that the model finds likely. LOSSY: it changes answers."""


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
            "stored, float32, float16 or bfloat16 (default: stored, float32 on a CPU)",
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
            "speculative drafts for every call, plain never (default: what is faster)",
            str,
            DECODINGS,
        ),
        ("--max-tokens", "N", "generate at most N tokens (default: %(default)s)", max_tokens),
        (
            "--template-args",
            "JSON",
            "variables for the chat template, such as '{\"enable_thinking\": false}'",
            parse_json_object,
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
        (
            "--generation-config",
            "SOURCE",
            "none: greedy without options (default: auto: as the model's file says)",
            str,
            ("auto", "none"),
        ),
        (
            "--temp",
            "T",
            "temperature; 0 takes the likeliest token (default: the model's, or 0)",
            float,
        ),
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


class ParseDrafter(argparse.Action):
    """The argparse action of --drafter; it stores a `DrafterOption`, or raises InputError."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, parse_drafter_option(values))


def add_drafter_and_tree_options(parser: argparse.ArgumentParser) -> None:
    """Add --drafter, with a table of all drafters and their settings, and the draft tree's
    options.
    """
    keys = {name: listed.keys for name, listed in DRAFTERS.items()}
    rows = [
        f"  {name:15} {'  '.join(own.split())}"
        for name, own in {**keys, "any of them": SHARED_KEYS}.items()
    ]
    title = "Drafters, each with its settings and their defaults:"
    group = parser.add_argument_group(
        "drafting (not with --decoding plain)", "\n".join([title, *rows, _LEGEND])
    )
    group.add_argument(
        "--drafter",
        action=ParseDrafter,
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


CHANCE_OPTIONS = ("top_p", "min_p", "top_k", "seed")
TREE_OPTIONS = ("tree", "tree_width", "tree_size")
PRUNE_OPTIONS = ("prune", "prune_to")
_SHAPE_OPTIONS = {
    "num_streams": "num_streams",
    **dict.fromkeys(TREE_OPTIONS, "tree"),
    **dict.fromkeys(PRUNE_OPTIONS, "prune"),
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
    drafting = {}
    if drafter.name is not None:
        from ..drafters.registry import drafting_arguments

        drafting = drafting_arguments(drafter)
    prune, has_threshold, _ = (getattr(args, "prune", None) or "").partition("=")
    _reject_idle_options(args, drafter.name, prune)
    tree = _renamed_given_options(args, kind="tree", width="tree_width", size="tree_size")
    pruning = {
        **({"kind": prune} if prune else {}),
        **_renamed_given_options(args, keep="prune_to"),
    }
    if has_threshold:
        pruning |= parse_pairs("--prune", [args.prune], ["threshold=P"])
    bias = getattr(args, "logit_bias", None)
    names = ("decoding", "max_tokens", "stop", "num_streams", "temp", *CHANCE_OPTIONS)
    config = GenerateConfig(
        tree=TreeConfig(**tree) if tree else None,
        prune=PruneConfig(**pruning) if pruning else None,
        logit_bias=dict(bias) if bias else None,
        **drafting,
        **_penalty_arguments(getattr(args, "penalty", None) or ()),
        **_renamed_given_options(
            args, **{name: name for name in (*names, "logprobs", "deterministic")}
        ),
    )
    is_alone = getattr(args, "generation_config", None) == "none"
    return config.following(ModelSampling()) if is_alone else config


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
        given = parse_pairs("--penalty", split_words("--penalty", text), shown)
        context = given.pop("context", None)
        if not given:
            refuse_option(f"--penalty {text}", "repetition=X, presence=X or frequency=X in it")
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
            refuse_option("--drafter", "speculative decoding")
        reject_given_options(args, _SHAPE_OPTIONS, "speculative decoding")
    for option, name in _SHAPE_OPTIONS.items():
        if drafter is not None and getattr(args, option, None) is not None:
            able = drafters_shaped_by(name)
            if drafter not in able:
                reject_given_options(args, (option,), "--drafter " + " or ".join(able))
    if getattr(args, "tree", None) == "full":
        reject_given_options(args, ("tree_size",), "--tree best")
    if prune != "budget":
        reject_given_options(args, ("prune_to",), "--prune budget")
    if getattr(args, "deterministic", None):
        reject_given_options(args, ("prompt_cache",), "no --deterministic")
    default = 0 if getattr(args, "generation_config", None) == "none" else None  # the model's own
    temp = getattr(args, "temp", None)
    if (default if temp is None else temp) == 0:
        reject_given_options(args, CHANCE_OPTIONS, "--temp above 0")


def drafters_shaped_by(name: str) -> list[str]:
    """Return the names of drafters whose trees the field `name` of `GenerateConfig` has an effect
    on.
    """
    from ..drafters.registry import registered_drafter

    return [one for one in DRAFTERS if name in registered_drafter(one).shaped_by]
