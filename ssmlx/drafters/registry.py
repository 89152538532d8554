"""Which drafters there are, and how one is found and built for an answer.

`ssmlx.settings.DRAFTERS` lists their names and classes, so that `--help` imports none of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn, cast

from ..decoding.drafter import Drafter
from ..decoding.sampling import Sampling
from ..errors import InputError, quoted, require
from ..model.capabilities import Capability
from ..model.streams import StreamFusedModel
from ..settings import DRAFTERS, GenerateConfig, field_of_drafter_settings
from .base import BaseDrafter, DrafterInputs, Loaded
from .option import parse_drafter_option


def drafter_class(name: str) -> type[BaseDrafter]:
    """The class of a drafter, whose file is imported when it is first asked for."""
    file, _, kind = DRAFTERS[name].path.partition(".")
    found: type[BaseDrafter] = getattr(import_module(f".{file}", __package__), kind)
    return found


def needed_capability(name: str) -> Capability:
    """The capability that a target needs for the drafter."""
    return "chains" if drafter_class(name).keeps_to_chains else "trees"


def settings_in(config: GenerateConfig, name: str) -> Any:
    """The drafter's own settings, or their defaults; None for a drafter without settings."""
    kind = DRAFTERS[name].settings
    if kind is None:
        return None
    field = field_of_drafter_settings(kind)
    given = getattr(config, field)
    if given is None:
        return kind()
    require(
        isinstance(given, kind),
        f"{field} is {quoted(given)}",
        expected=f"a {kind.__name__} for the drafter {name}",
        do="pass one, or omit it",
    )
    return given


def name_to_load(name: str, values: Mapping[str, Any]) -> str | None:
    """The name of the model or head to draft with, in the values of `--drafter` or by default."""
    loader = drafter_class(name).loader
    default = loader.default if loader else None
    found: str | None = values.get(DRAFTERS[name].loads.partition("=")[0], default)
    return found


def require_name_to_load(name: str, values: Mapping[str, Any]) -> None:
    """Refuse, before anything is loaded, a drafter that needs a model or head which no value of
    `--drafter` names."""
    if drafter_class(name).loader is not None and name_to_load(name, values) is None:
        _refuse_without_loaded(name)


def _refuse_without_loaded(name: str) -> NoReturn:
    loader = drafter_class(name).loader
    loads = DRAFTERS[name].loads
    assert loader is not None
    raise InputError(
        f"--drafter {name} without {loader.what}",
        expected=f"{loads} with it",
        do=f'give --drafter "{name} {loads}", or choose another',
    )


# A name in `ssmlx.settings.DRAFTERS`, with settings as `--drafter` takes them or without; what was
# loaded to draft with; or several of these.
DrafterArgument = str | Loaded | Sequence[str | Loaded]


def split_drafter(
    config: GenerateConfig, drafter: DrafterArgument | None
) -> tuple[GenerateConfig, list[Loaded]]:
    """The settings with the drafter that is named and what is set after its name, and what was
    loaded, in order."""
    named: list[str] = []
    loaded: list[Loaded] = []
    several = isinstance(drafter, Sequence) and not isinstance(drafter, str)
    for one in cast("Sequence[str | Loaded | None]", drafter if several else [drafter]):
        if isinstance(one, str):
            named.append(one)
        elif one is not None:
            require(
                hasattr(one, "drafter"),
                f"drafter= is {quoted(one)}",
                expected="a drafter's name, or what `load_draft_model`, `load_heads` or "
                "`load_mtp` returns",
                do="give one of these",
            )
            loaded.append(one)
    require(
        len(set(named)) < 2,
        f"drafter= names {' and '.join(named)}",
        expected="one name",
        do="remove the others",
    )
    return (_with_drafter(config, named[0]) if named else config), loaded


def _with_drafter(config: GenerateConfig, text: str) -> GenerateConfig:
    option = parse_drafter_option(text)
    given = option.generate_arguments()
    default = GenerateConfig()
    for name, value in given.items():
        require(
            name == "drafter" or getattr(config, name) in (getattr(default, name), value),
            f"drafter={text!r} beside {name}=",
            expected="these settings in one of them",
            do="remove one of them",
        )
    for key in option.values:
        require(
            key not in option.keys_of_loading,
            f"{key}= in drafter={text!r}",
            expected="only settings of drafts, as the weights are loaded already",
            do="pass it to load, load_draft_model, load_heads or load_mtp",
        )
    return replace(config, **given)


def build_drafter(
    name: str,
    model: StreamFusedModel,
    config: GenerateConfig,  # with nothing of the draft's shape left open
    sampling: Sampling,  # how the target decides
    loaded: Sequence[Loaded] = (),  # for this drafter or for others
    end_tokens: Collection[int] = (),  # end an answer, or a part of it
) -> Drafter:
    """Ready to start on one answer."""
    kind = drafter_class(name)
    own = _find_loaded(name, loaded)
    assert config.prune
    prune = config.prune.kind
    require(
        prune == "off" or "prune" in kind.shaped_by,
        f"--prune {prune} with --drafter {name}, whose trees must reach the target whole",
        expected="--prune off",
        do="remove --prune",
    )
    require(
        prune == "off" or (model.streams is not None and model.streams.prune is not None),
        f"--prune {prune}, but the adapter has no pruning adapter",
        expected="prune_adapter.* among its stream weights",
        do="use --prune off, or train one",
    )
    settings = settings_in(config, name)
    return kind.build(DrafterInputs(model, config, sampling, settings, own, end_tokens))


def _find_loaded(name: str, loaded: Sequence[Loaded]) -> Loaded | None:
    loader = drafter_class(name).loader
    own = next((one for one in loaded if one.drafter == name), None)
    if loader is None or own is not None:
        return own
    for other in loaded:
        require(
            drafter_class(other.drafter).loader != loader,
            f"--drafter {name} with {loader.what} for another drafter",
            expected=f"--drafter {other.drafter} with them",
            do=f"choose that drafter, or give other {loader.what}",
        )
    _refuse_without_loaded(name)
