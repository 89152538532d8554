"""The text that names a drafter and its settings, as "lookahead window=7": `--drafter`, `drafter=`
in Python; parsed before any drafter is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from ..errors import check_choice, require
from ..pairs import Key, parse_pairs, split_words
from ..settings import (
    DRAFTERS,
    AcceptanceConfig,
    DrafterLoading,
    GenerateConfig,
    field_of_drafter_settings,
    flag_of,
    key_of,
)


@dataclass(frozen=True)
class DrafterOption:
    """A drafter's name, and settings by key. The name is None if --drafter is not given."""

    name: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loading(self) -> DrafterLoading:
        return DrafterLoading(**self._given(DrafterLoading))

    @property
    def keys_of_loading(self) -> set[str]:
        """The keys that act when a model, or what drafts for it, is loaded."""
        loads = DRAFTERS[self.name].loads if self.name else ""
        own = {key_of(one) for kind, one in self._settings() if kind is DrafterLoading}
        return own | {loads.partition("=")[0]}

    def generate_arguments(self) -> dict[str, Any]:
        """The arguments of `GenerateConfig` that are given; InputError for one out of bounds."""
        if self.name is None:
            return {}
        found = {"drafter": self.name, **self._given(GenerateConfig)}
        own = DRAFTERS[self.name].settings
        if own is not None and (given := self._given(own)):
            found[field_of_drafter_settings(own)] = own(**given)
        if given := self._given(AcceptanceConfig):
            found["acceptance"] = AcceptanceConfig(**given)
        return found

    def _settings(self) -> list[tuple[type, Field[Any]]]:
        return [*own_settings(self.name), *shared_settings()] if self.name else []

    def _given(self, kind: type) -> dict[str, Any]:
        own = [one for owner, one in self._settings() if owner is kind]
        return {one.name: self.values[key_of(one)] for one in own if key_of(one) in self.values}


def own_settings(name: str) -> Iterator[tuple[type, Field[Any]]]:
    """(settings class, field) of each key that one drafter alone has."""
    yield from _keys_of_drafter(name)
    if (kind := DRAFTERS[name].settings) is not None:
        yield from ((kind, one) for one in fields(kind) if key_of(one))


def shared_settings() -> Iterator[tuple[type, Field[Any]]]:
    """(settings class, field) of each key that every drafter has."""
    return _keys_of_drafter("")


def _keys_of_drafter(name: str) -> Iterator[tuple[type, Field[Any]]]:
    kinds: tuple[Any, ...] = (GenerateConfig, AcceptanceConfig, DrafterLoading)
    for kind in kinds:
        for one in fields(kind):
            if key_of(one) and flag_of(one) == "--drafter" and one.metadata["drafter"] == name:
                yield kind, one


def own_keys(name: str) -> list[Key]:
    """The keys that one drafter alone has, that of what it loads first."""
    loads = DRAFTERS[name].loads
    own = [Key.of_field(kind, one) for kind, one in own_settings(name)]
    return [Key.of_path(loads), *own] if loads else own


def shared_keys() -> list[Key]:
    return [Key.of_field(kind, one) for kind, one in shared_settings()]


def parse_drafter_option(text: str) -> DrafterOption:
    """Parse a drafter's name and settings, such as "lookahead window=7".

    Raises:
        InputError: the drafter or a key is unknown, a value is of the wrong type, or a key needs
            `acceptance=typical`.
    """
    name, *words = split_words("--drafter", text) or [""]
    check_choice("--drafter", name, tuple(DRAFTERS))
    values = parse_pairs(f"--drafter {name}", words, [*own_keys(name), *shared_keys()])
    if values.get("acceptance") != "typical":
        for key in ("epsilon", "delta"):
            require(
                key not in values,
                f"{key}= would do nothing here",
                expected="acceptance=typical beside it",
                do=f"omit {key}=",
            )
    return DrafterOption(name, values)
