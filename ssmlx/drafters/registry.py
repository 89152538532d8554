"""Which drafters there are: each file registers what it defines, by `register_drafter`.

`ssmlx.settings.DRAFTERS` lists their names and files, so that `--help` imports none of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NoReturn, Protocol, TypeVar, cast

from ..decoding.drafter import Drafter
from ..decoding.sampling import GREEDY, Sampling
from ..errors import InputError, quoted, require
from ..model.capabilities import Capability
from ..model.streams import StreamFusedModel
from ..settings import DRAFTERS, GenerateConfig, field_of_drafter_settings
from .option import parse_drafter_option


class Loaded(Protocol):
    """What was loaded to draft with, such as weights: it is only read, so that any number of
    answers may share it.

    Attributes:
        drafter: the registered name of the drafter that it is for.
        nbytes: what it keeps in memory.
    """

    @property
    def drafter(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class DrafterInputs:
    """What a drafter is built from.

    Attributes:
        model: the target.
        config: the settings, with nothing of the draft's shape left open.
        sampling: how the target decides.
        settings: the drafter's own, of the class that it registered; None where that is None.
        end_tokens: tokens that end an answer, or a part of it. A drafter may end its drafts with
            them: what is accepted behind the one that ends the answer is dropped.
        loaded: what its `DrafterLoader` loaded; None where it needs nothing.
    """

    model: StreamFusedModel
    config: GenerateConfig
    sampling: Sampling
    settings: Any = None
    loaded: Any = None
    end_tokens: Collection[int] = ()

    @property
    def is_chain(self) -> bool:
        """Whether the target takes no trees, so that a chain has to be proposed."""
        return not self.model.backbone.capabilities.has("trees")

    @property
    def guess_sampling(self) -> Sampling:
        """How guesses are ranked: as the target decides; greedily under typical acceptance, which
        asks what is likely and not what is drawn."""
        return self.sampling if self.config.acceptance.kind == "exact" else GREEDY


@dataclass(frozen=True)
class DrafterLoader:
    """What a drafter must have from a file, a folder or the Hub, and how that is loaded.

    Attributes:
        what: what a message calls it, such as "a draft model".
        default: what the key of `ListedDrafter.loads` is where it is not given; None where it has
            to be.
        load: loads it, once a process: `load(name, model, tokenizer, dtype=, progress=)`. `name` is
            the key's value, `model` and `tokenizer` are the target's, the last two are as
            `ssmlx.load` takes them. What it returns is the `loaded` of `DrafterInputs`, and is only
            read from then on.
    """

    what: str
    load: Callable[..., Loaded]
    default: str | None = None


@dataclass(frozen=True, kw_only=True)
class RegisteredDrafter:
    """What is known of a drafter.

    Attributes:
        name: as `GenerateConfig.drafter` and `--drafter` take it.
        build: makes one for an answer.
        shaped_by: which of `tree`, `num_streams` and `prune` of `GenerateConfig` shape its trees.
        loader: how what it drafts with is loaded; None where it needs nothing beside the target.
        needs_whole_context: whether `start` has to be given every token of the text. Then an answer
            on a cache that holds tokens is refused unless `context=` says which; otherwise tokens
            that nobody gave are `PAD_TOKEN`.
        keeps_to_chains: whether it proposes chains where the target takes no trees.
        joins_text_drafts: whether a controller may draft by the text too where it is named.
    """

    name: str
    build: Callable[[DrafterInputs], Drafter]
    shaped_by: Sequence[str] = ("prune",)
    loader: DrafterLoader | None = None
    needs_whole_context: bool = False
    keeps_to_chains: bool = False
    joins_text_drafts: bool = False

    @property
    def needed(self) -> Capability:
        """What a target must be capable of."""
        return "chains" if self.keeps_to_chains else "trees"

    def own_settings_or_default(self, config: GenerateConfig) -> Any:
        """None for a drafter without settings, whatever `config` holds."""
        kind = DRAFTERS[self.name].settings
        if kind is None:
            return None
        name = field_of_drafter_settings(kind)
        given = getattr(config, name)
        if given is None:
            return kind()
        require(
            isinstance(given, kind),
            f"{name} is {quoted(given)}",
            expected=f"a {kind.__name__} for the drafter {self.name}",
            do="make one, or leave it out",
        )
        return given

    def name_to_load(self, values: Mapping[str, Any]) -> str | None:
        """What names what it drafts with, in the values of `--drafter` or by default."""
        default = self.loader.default if self.loader else None
        name: str | None = values.get(DRAFTERS[self.name].loads.partition("=")[0], default)
        return name

    def require_key_of_loader(self, values: Mapping[str, Any]) -> None:
        """Before anything is loaded: refuse a drafter that needs something loaded if no value of
        `--drafter` names it."""
        if self.loader is not None and self.name_to_load(values) is None:
            self.refuse_without_loaded()

    def refuse_without_loaded(self) -> NoReturn:
        assert self.loader is not None
        raise InputError(
            f"--drafter {self.name} without {self.loader.what}",
            expected=f"{DRAFTERS[self.name].loads} with it",
            do=f'give --drafter "{self.name} {DRAFTERS[self.name].loads}", or choose another',
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
        do="drop the others",
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
            do="drop the other",
        )
    for key in option.values:
        require(
            key not in option.keys_of_loading,
            f"{key}= in drafter={text!r}",
            expected="settings of drafts alone, of what is loaded already",
            do="give it to what loads: load, load_draft_model, load_heads or load_mtp",
        )
    return replace(config, **given)


_Build = TypeVar("_Build", bound=Callable[[DrafterInputs], Drafter])
_registered: dict[str, RegisteredDrafter] = {}  # filled by `register_drafter` on import


def register_drafter(name: str, **facts: Any) -> Callable[[_Build], _Build]:
    """Register a function as the `build` of the drafter `name`; `facts` are the other fields of
    `RegisteredDrafter`."""

    def register(build: _Build) -> _Build:
        _registered[name] = RegisteredDrafter(name=name, build=build, **facts)
        return build

    return register


def registered_drafter(name: str) -> RegisteredDrafter:
    """Its file is imported when it is first asked for."""
    import_module(f".{DRAFTERS[name].module}", __package__)
    return _registered[name]


def build_drafter(
    name: str,
    model: StreamFusedModel,
    config: GenerateConfig,  # with nothing of the draft's shape left open
    sampling: Sampling,  # how the target decides
    loaded: Sequence[Loaded] = (),  # for this drafter or for others
    end_tokens: Collection[int] = (),  # end an answer, or a part of it
) -> Drafter:
    """Ready to start on one answer."""
    registered = registered_drafter(name)
    own = _find_or_require_loaded(registered, loaded)
    assert config.prune
    prune = config.prune.kind
    require(
        prune == "off" or "prune" in registered.shaped_by,
        f"--prune {prune} with --drafter {name}, whose trees must reach the target whole",
        expected="--prune off",
        do="drop --prune",
    )
    require(
        prune == "off" or (model.streams is not None and model.streams.prune is not None),
        f"--prune {prune}, but the adapter has no pruning adapter",
        expected="prune_adapter.* among its stream weights",
        do="use --prune off, or train one",
    )
    settings = registered.own_settings_or_default(config)
    return registered.build(DrafterInputs(model, config, sampling, settings, own, end_tokens))


def _find_or_require_loaded(
    registered: RegisteredDrafter, loaded: Sequence[Loaded]
) -> Loaded | None:
    loader = registered.loader
    name = registered.name
    own = next((one for one in loaded if one.drafter == name), None)
    if loader is None or own is not None:
        return own
    for other in loaded:
        require(
            registered_drafter(other.drafter).loader != loader,
            f"--drafter {name} with {loader.what} for another drafter",
            expected=f"--drafter {other.drafter} with them",
            do=f"choose that drafter, or give other {loader.what}",
        )
    return registered.refuse_without_loaded()
