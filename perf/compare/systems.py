"""The systems of `perf.compare`, and how a user names them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ssmlx.commands.options import (
    Parser,
    add_tree_options,
    generate_config,
)
from ssmlx.errors import InputError
from ssmlx.settings import GenerateConfig, SamplingConfig

from ..run.systems import MLX_LM

PLAIN, DRAFT_ALONE = "plain", "draft model alone"
CHECKPOINTS = ("medusa", "mlp-speculator", "draft-model")
SYSTEMS = (MLX_LM, PLAIN, "streams", *CHECKPOINTS, "lookahead", "prompt-lookup")
_RESERVED = ("model", "heads", "head", "acceptance", "epsilon", "delta", "attention")


@dataclass(frozen=True)
class DecodingMethod:
    """A way to answer in `perf.compare`, on weights that all share.

    Attributes:
        name: as in the tables: its kind, and its options where it has some.
        kind: one of `SYSTEMS`, or `DRAFT_ALONE`: the draft model by itself, to time its calls.
        config: None for mlx-lm's own loop.
    """

    name: str
    kind: str
    config: GenerateConfig | None = None


def parse_systems(texts: Sequence[str], sampling: SamplingConfig) -> list[DecodingMethod]:
    """The systems to run, mlx-lm and plain decoding always among them.

    Raises:
        InputError: one is unknown, named twice, or its options are wrong.
    """
    systems: dict[str, DecodingMethod] = {}
    for text in texts:
        system = parse_system(text, sampling)
        if system.name in systems:
            raise InputError(f"--systems names {text!r} twice", expected="each once", do="drop one")
        systems[system.name] = system
    for kind in (PLAIN, MLX_LM):
        if kind not in systems:
            systems = {kind: parse_system(kind, sampling), **systems}
    return list(systems.values())


class _SystemParser(Parser):
    """The drafting options of ssmlx.generate, whose mistakes are told as a system's."""

    def error(self, message: str) -> NoReturn:
        """Tell what was wrong."""
        raise InputError(
            f"--systems: {self.prog} ({message})",
            expected="a system, or in quotes a system and drafting options of ssmlx.generate",
            do="see python -m ssmlx.generate --help",
        )


def parse_system(text: str, sampling: SamplingConfig) -> DecodingMethod:
    """`streams lookup=8 --tree full` as a system: a drafter and tree options of ssmlx.generate.

    Raises:
        InputError: the kind is unknown, or an option is, or could have no effect.
    """
    words = text.split()
    kind, flags = next(iter(words), ""), [n for n, word in enumerate(words) if word[0] == "-"]
    if kind not in SYSTEMS or (kind in (MLX_LM, PLAIN) and words[1:]):
        raise InputError(
            f"--systems {text!r}",
            expected="one of " + ", ".join(SYSTEMS) + "; those that draft with options, in quotes",
            do='write such as --systems mlx-lm streams "streams --tree full"',
        )
    name = " ".join(words)
    if kind == MLX_LM:
        return DecodingMethod(name, kind)
    first = next(iter(flags), len(words))
    args = parse_drafting(name, words[1:first], words[first:])
    args.decoding, args.drafter = PLAIN, None
    if kind != PLAIN:
        args.decoding, args.drafter = "streaming", " ".join(words[:first])
    # What its name says, on every machine: no profile of this one decides.
    config = generate_config(args).with_default_shape()
    return DecodingMethod(name, kind, replace(config, **sampling_values(sampling)))


def parse_drafting(name: str, keys: Sequence[str], options: Sequence[str]) -> argparse.Namespace:
    """The tree options of a system; its drafter's keys are only looked at.

    Raises:
        InputError: one is unknown, or is for this command to decide.
    """
    parser = _SystemParser(prog=name, add_help=False, allow_abbrev=False)
    add_tree_options(parser.add_argument_group())
    for key in keys:
        if key.partition("=")[0] in _RESERVED:
            parser.error(f"{key} is not a system's to choose here")
    return parser.parse_args(options)


def sampling_values(sampling: SamplingConfig) -> dict[str, Any]:
    """The settings of `SamplingConfig` that this command has."""
    return {"temp": sampling.temp, "top_k": sampling.top_k, "seed": sampling.seed}


def with_max_tokens(system: DecodingMethod, most: int) -> DecodingMethod:
    """The system, its answers no longer than `most` tokens."""
    if system.config is None:
        return system
    return replace(system, config=replace(system.config, max_tokens=most))
