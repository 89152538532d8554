"""The options of a model and of how it decodes, and the settings that they come to.

Options that another one makes meaningless have no default, so that they can be refused.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from ..drafters.option import (
    DrafterOption,
    own_keys,
    own_settings,
    parse_drafter_option,
    shared_keys,
    shared_settings,
)
from ..errors import require
from ..loading.names import AUTO_ADAPTER, DEFAULT_ADAPTER, bundled_adapters
from ..pairs import Key, parse_pairs, split_words
from ..settings import (
    DEFAULT_MODEL,
    DRAFTERS,
    DTYPES,
    PENALTIES,
    GenerateConfig,
    ModelSampling,
    PruneConfig,
    SamplingConfig,
    TreeConfig,
    flag_of,
    key_of,
    settings_fields,
)
from .parser import add_options, parse_json_object, refuse_option, reject_given_options
from .setting_options import (
    add_setting_options,
    defaults_in_words,
    given_settings,
    option_fields,
)


def add_model_options(
    parser: argparse.ArgumentParser,
    adapters: Any = AUTO_ADAPTER,  # `list` if --adapter may be repeated
) -> None:
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
            f"{bundled} (bundled), a folder, a Hub name, LoRA of mlx-lm or PEFT, or none "
            f"(default: auto: its own streams, one made here, or {DEFAULT_ADAPTER})",
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


def add_decoding_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options of decoding, sampling and drafting, in groups; the default of --max-tokens is
    `max_tokens`."""
    group = parser.add_argument_group("decoding")
    _add_group(group, "decoding", {"max_tokens": max_tokens})
    add_options(
        group,
        (
            "--template-args",
            "JSON",
            "variables for the chat template, such as '{\"enable_thinking\": false}'",
            parse_json_object,
        ),
    )
    group = parser.add_argument_group("sampling (drafting does not change its distribution)")
    add_options(
        group,
        (
            "--generation-config",
            "SOURCE",
            "none: ignore the model's generation_config.json (default: auto: follow it)",
            str,
            ("auto", "none"),
        ),
    )
    _add_group(group, "sampling")
    penalties = [f"{name}=X" for name in PENALTIES]
    recent = SamplingConfig().repetition_context_size
    add_options(
        group,
        (
            "--penalty",
            "NAME=X",
            f"{', '.join(penalties[:-1])} or {penalties[-1]} of recent tokens, such as "
            f'"repetition=1.2 context=64" (default context: {recent}); repeatable',
            list,
        ),
    )
    add_drafting_options(parser)


def _add_group(
    group: argparse._ActionsContainer, title: str, defaults: dict[str, Any] | None = None
) -> None:
    """Add the options of `GenerateConfig` whose group has this title; those without a default here
    are None unless given, so that they can be refused where they would do nothing."""
    names = [one.name for one in fields(GenerateConfig) if one.metadata.get("group") == title]
    given = defaults or {}
    words = defaults_in_words(GenerateConfig).items()
    shown = {name: text for name, text in words if name not in given}
    add_setting_options(group, GenerateConfig, names, defaults=given, shown=shown)


class ParseDrafter(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, parse_drafter_option(values))


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """Add --drafter, with a table of all drafters and their keys, and the draft tree's options."""
    known = {**{name: own_keys(name) for name in DRAFTERS}, "any of them": shared_keys()}
    rows = [f"  {name:15} {'  '.join(map(str, keys))}" for name, keys in known.items()]
    settings = [one for name in DRAFTERS for _, one in own_settings(name)]
    settings += [one for _, one in shared_settings()]
    explained = [f"{key_of(one)}: {text}." for one in settings if (text := one.metadata["help"])]
    legend = textwrap.wrap(" ".join(explained), width=98)
    title = "Drafters, each with its settings and their defaults:"
    group = parser.add_argument_group(
        "drafting (not with --decoding plain)", "\n".join([title, *rows, *legend])
    )
    group.add_argument(
        "--drafter",
        action=ParseDrafter,
        default=DrafterOption(),
        metavar='"NAME ..."',
        help='such as "lookahead window=7" (default: streams if there are any)',
    )
    text = "Without these and --decoding, the size is chosen for each call, by measured costs."
    add_tree_options(parser.add_argument_group("draft tree", text))


def add_tree_options(group: argparse._ArgumentGroup) -> None:
    _add_group(group, "draft tree")
    for kind in (TreeConfig, PruneConfig):
        add_setting_options(group, kind, shown=defaults_in_words(kind))


TREE_OPTIONS = tuple(option_fields(TreeConfig))
PRUNE_OPTIONS = tuple(option_fields(PruneConfig))
_SHAPE_OPTIONS = {
    "num_streams": "num_streams",
    **dict.fromkeys(TREE_OPTIONS, "tree"),
    **dict.fromkeys(PRUNE_OPTIONS, "prune"),
}
"""Options, and the field of `GenerateConfig` that each belongs to."""


def generate_config(args: argparse.Namespace) -> GenerateConfig:
    """The settings that a command's options give; InputError for one that is out of bounds or would
    have no effect."""
    drafter: DrafterOption = getattr(args, "drafter", DrafterOption())
    _reject_idle_options(args, drafter.name)
    found = given_settings(args, GenerateConfig)
    for name, (kind, *_) in settings_fields(GenerateConfig).items():
        given = given_settings(args, kind)
        if kind is PruneConfig:
            given = _with_pruning_threshold(given)
        if given:
            found[name] = kind(**given)
    found |= drafter.generate_arguments()
    found |= _penalty_arguments(getattr(args, "penalty", None) or ())
    config = GenerateConfig(**found)
    is_alone = getattr(args, "generation_config", None) == "none"
    return config.following(ModelSampling()) if is_alone else config


def _with_pruning_threshold(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of pruning in which "threshold=P", a value of --prune, has become two of them."""
    text = given.pop("kind", "")
    kind, has_value, _ = text.partition("=")
    if kind:
        given["kind"] = kind
    if has_value:
        keys = [Key.of_field(PruneConfig, one) for one in fields(PruneConfig) if key_of(one)]
        given |= parse_pairs("--prune", [text], keys)
    return given


def _penalty_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """The settings that --penalty gives; `context=` holds for the penalties of its value."""
    named = [one for one in fields(SamplingConfig) if flag_of(one) == "--penalty"]
    keys = {key_of(one): Key.of_field(SamplingConfig, one) for one in named}.values()
    settings: dict[str, Any] = {}
    for text in texts:
        given = parse_pairs("--penalty", split_words("--penalty", text), keys)
        context = given.pop("context", None)
        if not given:
            refuse_option(f"--penalty {text}", "repetition=X, presence=X or frequency=X in it")
        for name, value in given.items():
            require(
                f"{name}_penalty" not in settings,
                f"--penalty {name}= twice",
                expected="each once",
                do="omit one",
            )
            settings[f"{name}_penalty"] = value
            if context is not None:
                settings[f"{name}_context_size"] = context
    return settings


def _reject_idle_options(args: argparse.Namespace, drafter: str | None) -> None:
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
        reject_options_needing("--tree best", args)
    if getattr(args, "prune", None) != "budget":
        reject_options_needing("--prune budget", args)
    if getattr(args, "deterministic", None):
        reject_given_options(args, ("prompt_cache",), "no --deterministic")
    default = 0 if getattr(args, "generation_config", None) == "none" else None  # the model's own
    temp = getattr(args, "temp", None)
    if (default if temp is None else temp) == 0:
        reject_options_needing("--temp above 0", args)


def reject_options_needing(needs: str, args: argparse.Namespace) -> None:
    """Raise InputError for a given option that has no effect without what it needs."""
    for kind in (GenerateConfig, TreeConfig, PruneConfig):
        known = option_fields(kind).items()
        names = [name for name, one in known if one.metadata["needs"] == needs]
        reject_given_options(args, names, needs)


def drafters_shaped_by(name: str) -> list[str]:
    """The drafters whose trees the field `name` of `GenerateConfig` shapes."""
    from ..drafters.registry import drafter_class

    return [one for one in DRAFTERS if name in drafter_class(one).shaped_by]
