"""The base of this package's drafters, the inputs they are built from, and loaders of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Drafter, Needs, Taps, Verified
from ..decoding.sampling import GREEDY, Sampling
from ..model.streams import StreamFusedModel
from ..model.tree import Tree
from ..settings import GenerateConfig


class Loaded(Protocol):
    """A loaded model or head to draft with: it is only read, so that any number of
    answers may share it.

    Attributes:
        drafter: the name of the drafter that it is for.
        nbytes: bytes that it keeps in memory.
    """

    @property
    def drafter(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class DrafterLoader:
    """A model or head that a drafter needs from a file, a folder or the Hub, and its loader.

    Attributes:
        what: its name in messages, such as "a draft model".
        load: loads it, once a process: `load(name, model, tokenizer, dtype=, progress=)`. `name` is
            the value of the key `ListedDrafter.loads`, `model` and `tokenizer` are the target's,
            the last two are as `ssmlx.load` takes them. What it returns is the `loaded` of
            `DrafterInputs`, and is only read from then on.
        default: the key's value unless it is given; None if it must be given.
    """

    what: str
    load: Callable[..., Loaded]
    default: str | None = None


@dataclass(frozen=True, eq=False)
class DrafterInputs:
    """The inputs that a drafter is built from.

    Attributes:
        model: the target.
        config: the settings, with nothing of the draft's shape left open.
        sampling: how the target decides.
        settings: the drafter's own, of its class in `settings.DRAFTERS`; None without one.
        loaded: what its `DrafterLoader` loaded; None without one.
        end_tokens: tokens that end an answer, or a part of it. A drafter may end its drafts with
            them: what is accepted after the one that ends the answer is dropped.
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
        """The sampling by which guesses are ranked: the target's; greedy under typical acceptance,
        which asks what is likely and not what is drawn."""
        return self.sampling if self.config.acceptance.kind == "exact" else GREEDY


class BaseDrafter:
    """A drafter that `settings.DRAFTERS` lists. A subclass has a `name`, the `largest` tree that it
    proposes, `build` and `propose`, and overrides any other attribute as needed.
    `decoding.drafter.Drafter` says when a loop calls its methods.

    Attributes:
        name: in `DRAFTERS`.
        shaped_by: which of `tree`, `num_streams` and `prune` of `GenerateConfig` shape its trees.
        loader: loads what it drafts with; None if it needs nothing beside the target.
        needs_whole_context: whether `start` has to be given every token of the text. Then an answer
            on a cache that holds tokens is refused unless `context=` says which; otherwise unknown
            tokens are `PAD_TOKEN`.
        keeps_to_chains: whether it proposes chains if the target takes no trees.
        joins_text_drafts: whether a controller may also draft by the text if this one is named.
    """

    name: str
    shaped_by: ClassVar[Sequence[str]] = ("prune",)
    loader: ClassVar[DrafterLoader | None] = None
    needs_whole_context: ClassVar[bool] = False
    keeps_to_chains: ClassVar[bool] = False
    joins_text_drafts: ClassVar[bool] = False

    largest: DraftShape
    needs = Needs()
    num_parameters = 0
    draft_model_calls = 0

    @property
    def cache_bytes(self) -> int:
        return 0

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Drafter:
        raise NotImplementedError

    def start(self, tokens: Sequence[int]) -> Iterator[None] | None:
        return None

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        return None

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        raise NotImplementedError
