"""Drafts from the head for multi-token prediction (MTP) that a model was trained with."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import get_total_parameters

from ..bars import Progress
from ..decoding.draft_shape import DraftShape
from ..decoding.drafter import Drafter, Needs, Taps, Verified
from ..decoding.sampling import Sampling
from ..errors import require
from ..json_files import read_json
from ..loading.folders import Fetch
from ..loading.model_heads import find_local_head
from ..loading.names import resolve_model
from ..model.backbone import Backbone
from ..model.family import model_type
from ..model.modules import module_arrays
from ..model.shapes import evaluated
from ..model.streams import StreamFusedModel
from ..model.tree import PAD_TOKEN, Tree, chain_tree, root_tree
from ..policy.offers import LevelsOffer
from ..prompts import common_prefix_length
from ..settings import PREFILL_STEP_SIZE, MtpConfig, MtpNorms
from .base import BaseDrafter, DrafterInputs, DrafterLoader
from .chain import ChainRanking, UnacceptedDrafts
from .gemma_assistant import Assistant, AssistantDrafter, load_assistant
from .gemma_assistant_model import MODEL_TYPES as ASSISTANT_TYPES
from .mtp_head import (
    MtpModule,
    load_mtp_module,
    resolve_norms,
)
from .text_caches import TextCacheOwner

_MOST_PENDING = 32  # pairs that wait for the next draft, before they are processed without one


class MtpHead(TextCacheOwner["PairCache"]):
    """An MTP head that was loaded for a model: weights, which are only read, and caches of texts.

    Caches outlive answers: a chat's next turn takes over what the last one left.
    """

    drafter = "mtp"

    def __init__(
        self,
        module: MtpModule,  # its norms' weights as they are stored
        backbone: Backbone,  # the target; only its sizes are kept
    ) -> None:
        super().__init__(PairCache)
        self._module = module
        self._by_norms: dict[str, MtpModule] = {}
        self._sizes = backbone.hidden_size, backbone.vocab_size
        self.num_parameters: int = get_total_parameters(module)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its caches."""
        return sum(array.nbytes for array in module_arrays(self._module)) + self.cache_bytes

    def module_for(self, stored_norms: MtpNorms) -> MtpModule:
        """The module with norms of the weights that they multiply with; made once for each way of
        storing them."""
        if stored_norms not in self._by_norms:
            made = resolve_norms(self._module, stored_norms)
            self._by_norms[stored_norms] = made
        return self._by_norms[stored_norms]

    def require_fits(self, backbone: Backbone) -> None:
        sizes = backbone.hidden_size, backbone.vocab_size
        require(
            sizes == self._sizes,
            f"the MTP head is for a width of {self._sizes[0]} and {self._sizes[1]} tokens",
            expected=f"{sizes[0]} and {sizes[1]}, as in this model",
            do="load the head for this model",
        )


class PairCache:
    """Keys and values of the head's layer for the pairs of one text, at their positions in it.

    Pair i is the hidden state of position i and the token after it. Pairs may be missing: of tokens
    that a prompt cache held, for instance, whose hidden states were not computed.
    """

    def __init__(self) -> None:
        self.text: list[int] = []  # unknown tokens are `PAD_TOKEN`
        self.places: list[int] = []  # by row, the number of its pair, ascending
        self._rows = KVCache()

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self._rows.keys, self._rows.values) if one is not None)

    @property
    def state(self) -> list[mx.array]:
        return [one for one in (self._rows.keys, self._rows.values) if one is not None]

    def set_text(self, tokens: Sequence[int]) -> None:
        """Set the text, and keep the pairs within what `tokens` shares with the text before, up to
        the first unknown token."""
        shared = common_prefix_length(self.text, tokens)
        unknown = next((n for n, one in enumerate(tokens[:shared]) if one == PAD_TOKEN), shared)
        self.places = self.places[: bisect_left(self.places, min(shared, unknown) - 1)]
        self.keep_first_rows(len(self.places))
        self.text = list(tokens)

    def copy_beginning(self, num_tokens: int) -> "PairCache":
        copied = PairCache()
        copied.text = self.text[:num_tokens]
        copied.places = self.places[: bisect_left(self.places, num_tokens - 1)]
        if num_rows := len(copied.places):
            rows = copied._rows
            rows.keys = mx.contiguous(self._rows.keys[..., :num_rows, :])
            rows.values = mx.contiguous(self._rows.values[..., :num_rows, :])
            rows.offset = num_rows
            mx.eval(copied.state)
        return copied

    def keep_first_rows(self, num_rows: int) -> None:
        self._rows.trim(self._rows.offset - num_rows)

    def writer_at(self, number: int) -> "_RowsAt":
        """The cache that the head's layer is given to append rows of the pairs from `number` on;
        `places` is left to the caller."""
        return _RowsAt(self._rows, number)


class _RowsAt:
    """A `KVCache` whose next row has a given position in the text."""

    def __init__(self, rows: KVCache, position: int) -> None:
        self._rows = rows
        self.offset = position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        fetched: tuple[mx.array, mx.array] = self._rows.update_and_fetch(keys, values)
        return fetched


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs that follow each other and were not processed yet."""

    first: int  # the number of the first one
    hidden: mx.array  # [1, R, D] what enters the target's final norm

    @property
    def end(self) -> int:
        """The number after the last one's."""
        return self.first + int(self.hidden.shape[1])


def _load(name: str, model: StreamFusedModel, tokenizer: object, **how: Any) -> MtpHead | Assistant:
    return load_mtp(model, name or None, **how)


class MtpDrafter(BaseDrafter):
    """Drafts a chain of K tokens by K calls of an MTP head, the first on true hidden states.

    The head keeps the text's pairs in a cache of its own: of the prompt as its pieces come, of
    answers with the next draft. Rows of drafted tokens are dropped after each draft; what is
    accepted comes in again with the target's own hidden states. If the target samples, drafts are
    drawn under the same settings and the same noise.
    """

    name = "mtp"
    loader = DrafterLoader("an MTP head", _load, default="")
    keeps_to_chains = True
    joins_text_drafts = True

    def __init__(
        self, backbone: Backbone, head: MtpHead, config: MtpConfig, sampling: Sampling
    ) -> None:
        head.require_fits(backbone)
        self._backbone = backbone
        self._head = head
        self._module = head.module_for(config.norms)
        self._config = config
        self._sampling = sampling
        self._tap = len(backbone.layers)
        levels = config.num_draft_tokens
        self.largest = DraftShape(self.name, 1 + levels, levels)
        self.needs = Needs(taps=(self._tap,), host_tokens=True)
        self.num_parameters = head.num_parameters
        self.draft_model_calls = 0
        self._cache = PairCache()
        self._pending: list[_Pairs] = []
        self._unaccepted = self._new_unaccepted_drafts()

    @classmethod
    def build(cls, inputs: DrafterInputs) -> Drafter:
        backbone = inputs.model.backbone
        config: MtpConfig = inputs.settings
        sampling = inputs.guess_sampling
        if not isinstance(inputs.loaded, Assistant):
            return cls(backbone, inputs.loaded, config, sampling)
        for name in ("hidden", "norms"):
            require(
                getattr(config, name) == getattr(MtpConfig(), name),
                f"{name}={getattr(config, name)} with an assistant of Gemma 4",
                expected="a head for multi-token prediction",
                do=f"remove {name}=",
            )
        return AssistantDrafter(inputs.loaded, backbone, config.num_draft_tokens, sampling)

    def start(self, tokens: Sequence[int]) -> None:
        self._cache = self._head.claim_idle_or_new_cache(tokens, self)
        self._cache.set_text(tokens)
        self._pending = []
        self._unaccepted = self._new_unaccepted_drafts()

    def follow(self, tokens: Sequence[int], position: int, taps: Taps | None = None) -> None:
        self._unaccepted.note_accepted(len(tokens) - 1)
        self._cache.text.extend(tokens)
        if taps is None:
            return
        self._pending.append(_Pairs(position - 1, taps[self._tap]))
        waiting = self._pending[-1].end - self._pending[0].first
        if waiting > _MOST_PENDING:
            self._process_pending()

    def offer(self) -> LevelsOffer | None:
        return None if self._unaccepted.has_warned else LevelsOffer(self.largest)

    def propose(self, verified: Verified, shape: DraftShape) -> Tree:
        """Process pending pairs, then draft a chain; a bare root if the newest hidden state is not
        known."""
        cache = self._cache
        newest = len(cache.text) - 2
        if not self._pending or self._pending[-1].end != newest + 1:
            return root_tree(verified.root)
        out = self._process(self._take_pending())
        num_rows = len(cache.places)
        chain = [verified.root]
        ranking = ChainRanking(self._sampling, cache.text)
        for level in range(shape.levels):
            if level:
                hidden = self._next_hidden(out)
                out = self._run_head(chain[-1], hidden, newest + level)
            logits = self._backbone.lm_head(self._module.norm(out[:, -1:])).squeeze(0)
            chain.append(ranking.rank(logits))
        cache.keep_first_rows(num_rows)
        self._unaccepted.note_chain(shape.levels)
        return chain_tree(mx.concatenate(chain))

    def _new_unaccepted_drafts(self) -> UnacceptedDrafts:
        other = "before" if self._config.hidden == "after" else "after"
        do = f"try hidden={other} or norms=raw|shifted in --drafter mtp, or another head"
        return UnacceptedDrafts("the MTP head", do)

    def _take_pending(self) -> list[_Pairs]:
        """Take the pending pairs, and clear them; those that follow each other are joined."""
        joined: list[list[_Pairs]] = []
        for pairs in self._pending:
            if joined and joined[-1][-1].end == pairs.first:
                joined[-1].append(pairs)
            else:
                joined.append([pairs])
        self._pending = []
        return [
            _Pairs(run[0].first, mx.concatenate([one.hidden for one in run], axis=1))
            for run in joined
        ]

    def _process_pending(self) -> None:
        """Process the pending pairs but the last, which stays pending for the next draft. Waits for
        the device after each piece."""
        *runs, last = self._take_pending()
        self._pending = [_Pairs(last.end - 1, evaluated(last.hidden[:, -1:]))]
        if last.hidden.shape[1] > 1:
            runs.append(_Pairs(last.first, last.hidden[:, :-1]))
        for run in runs:
            for first in range(0, run.hidden.shape[1], PREFILL_STEP_SIZE):
                piece = run.hidden[:, first : first + PREFILL_STEP_SIZE]
                self._process([_Pairs(run.first + first, piece)])
                # Of all but keys and values nothing is needed, and nothing is computed.
                mx.eval(self._cache.state)

    def _process(self, runs: list[_Pairs]) -> mx.array:  # [1, R, D]
        """Run the layer on pairs; its output for the last run, lazy. The cache keeps all rows."""
        cache = self._cache
        out = mx.zeros(0)
        for run in runs:
            hidden = run.hidden
            if self._config.hidden == "after":
                hidden = self._backbone.final_norm(hidden)
            tokens = mx.array(cache.text[run.first + 1 : run.end + 1], mx.int32)
            out = self._run_head(tokens, hidden, run.first)
            cache.places += range(run.first, run.end)
        return out

    def _run_head(
        self,
        tokens: mx.array,  # [R] after the hidden states
        hidden: mx.array,  # [1, R, D] as the head reads them
        first_pair: int,  # its number
    ) -> mx.array:  # [1, R, D] the layer's output
        self.draft_model_calls += 1
        embedded = self._backbone.token_embeddings(tokens[None])
        return self._module.run_pairs(embedded, hidden, self._cache.writer_at(first_pair))

    def _next_hidden(
        self,
        out: mx.array,  # [1, R, D]
    ) -> mx.array:  # [1, 1, D]
        """The head's stand-in for the target's hidden state after the last row."""
        newest = out[:, -1:]
        return self._module.norm(newest) if self._config.hidden == "after" else newest


def load_mtp(
    model: StreamFusedModel,
    name: str | Path | None = None,
    *,
    dtype: str = "auto",
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> MtpHead | Assistant:
    """Load what a model was published with to draft several tokens: its head for multi-token
    prediction, or an assistant, to be given as `drafter=` to `ssmlx.stream_generate`.

    Heads are for Qwen3-Next and Qwen3.5, assistants for Gemma 4. If the model is quantised and the
    head is not, it is quantised as the model is. The model's own files often lack a head:
    converters drop it. InputError if there is none, it is incomplete, or it does not fit the model.

    Args:
        model: as `ssmlx.load` returns it.
        name: the folder or the Hub name that holds it; unless given, the model's own folder, or
            else a known one in the Hub's cache, see `loading.model_heads.find_local_head`.
        dtype: of an assistant's weights, as `ssmlx.load` takes it; a head has the model's.
        cache_dir, offline, progress: as `ssmlx.load` takes them.
    """
    model.backbone.capabilities.require("last_hidden", "an MTP head")
    found = None if name else find_local_head(model.backbone)
    name = name or (found.folder if found else None)
    folder = config = None
    if name:
        folder = resolve_model(name, Fetch(cache_dir=cache_dir, offline=offline, progress=progress))
        config = read_json(folder / "config.json", "settings")
        if config.get("model_type") in ASSISTANT_TYPES:
            return load_assistant(folder, config, model.backbone, dtype)
    kind = model_type(model.backbone.model)
    require(
        not kind.startswith("gemma4"),
        f"{folder or '--drafter mtp'} with the model type {kind!r}, which has no head of its own",
        expected="an assistant of Gemma 4, of the model type gemma4_assistant",
        do='give --drafter "mtp model=ASSISTANT"',
    )
    return MtpHead(load_mtp_module(model, folder, config), model.backbone)
