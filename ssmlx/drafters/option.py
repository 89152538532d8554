"""--drafter: a drafter's name and its settings, parsed before any drafter is imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import check_choice
from ..settings import (
    ATTENTIONS,
    DRAFT_HEADS,
    DRAFTERS,
    AcceptanceConfig,
    Attention,
)
from .pairs import parse_pairs, split_words
from .parser import refuse_option

SHARED_KEYS = "acceptance=exact|typical epsilon=0.09 delta=0.3 attention=auto|mlx|fused"
"""What --drafter takes for every drafter, as `ListedDrafter.keys` are written."""


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


class ParseDrafter(argparse.Action):
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
    name, *words = split_words("--drafter", text) or [""]
    check_choice("--drafter", name, tuple(DRAFTERS))
    keys = f"{DRAFTERS[name].keys} {SHARED_KEYS}".split()
    values = parse_pairs(f"--drafter {name}", words, keys)
    if values.get("acceptance") != "typical":
        for key in {"epsilon", "delta"} & set(values):
            refuse_option(f"{key}=", "acceptance=typical beside it")
    return DrafterOption(name, values)


def drafting_arguments(option: DrafterOption) -> dict[str, Any]:
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


def require_drafter_key(option: DrafterOption) -> None:
    """Raise InputError where a drafter is named without the key that it needs, such as `model=`."""
    from ..drafters.registry import registered_drafter

    if option.name is not None:
        registered_drafter(option.name).require_key_of_loader(option.values.keys())
