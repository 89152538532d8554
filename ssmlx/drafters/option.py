"""What names a drafter and its settings, such as "lookahead window=7": `--drafter`, and `drafter=`
in Python; parsed before any drafter is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import check_choice, require
from ..pairs import parse_pairs, split_words
from ..settings import ATTENTIONS, DRAFT_HEADS, DRAFTERS, Attention

SHARED_KEYS = "acceptance=exact|typical epsilon=0.09 delta=0.3 attention=auto|mlx|fused"
"""What --drafter takes for every drafter, as `ListedDrafter.keys` are written."""


@dataclass(frozen=True)
class DrafterOption:
    """A drafter's name, and settings by key. The name is None where --drafter is not given."""

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


def parse_drafter_option(text: str) -> DrafterOption:
    """Parse a drafter's name and settings, such as "lookahead window=7".

    Raises:
        InputError: the drafter or a key is unknown, a value is of the wrong type, or a key needs
            `acceptance=typical`.
    """
    name, *words = split_words("--drafter", text) or [""]
    check_choice("--drafter", name, tuple(DRAFTERS))
    keys = f"{DRAFTERS[name].keys} {SHARED_KEYS}".split()
    values = parse_pairs(f"--drafter {name}", words, keys)
    if values.get("acceptance") != "typical":
        for key in ("epsilon", "delta"):
            require(
                key not in values,
                f"{key}= would do nothing here",
                expected="acceptance=typical beside it",
                do=f"drop {key}=",
            )
    return DrafterOption(name, values)
