"""Frozen settings classes, checked when they are made; they hold values, never loaded weights."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from .errors import InputError, one_line, quoted, require

Decoding = Literal["speculative", "plain"]
StreamInit = Literal["identity", "low_rank", "residual"]
StreamDesign = Literal["embeddings", "value_rotation"]
AdapterScope = Literal["all", "streams"]
StreamSchedule = Literal["second-pass", "fused"]
TreeKind = Literal["full", "best"]
PruneKind = Literal["off", "budget", "threshold"]
AcceptanceKind = Literal["exact", "typical"]
Attention = Literal["auto", "mlx", "fused"]
DraftHead = Literal["auto", "stored", "8bit"]
MtpHidden = Literal["after", "before"]
MtpNorms = Literal["auto", "raw", "shifted"]
"""How weights of norms are stored. "raw": one less than they multiply by, as in Qwen's own files;
"shifted": one already added, as mlx-lm converts them; "auto": detected from those of the layer."""

DECODINGS = get_args(Decoding)
STREAM_INITS = get_args(StreamInit)
STREAM_DESIGNS = get_args(StreamDesign)
ADAPTER_SCOPES = get_args(AdapterScope)
STREAM_SCHEDULES = get_args(StreamSchedule)
ACCEPTANCES = get_args(AcceptanceKind)
ATTENTIONS = get_args(Attention)
DRAFT_HEADS = get_args(DraftHead)
DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("auto", "stored", "float32", "float16", "bfloat16")
MAX_TREE_NODES = 1024
FULL_WIDTH = 3  # of a full tree, unless it is given
PRUNE_THRESHOLD = 0.05
MAX_DRAFT_TOKENS = 256
MAX_MTP_TOKENS = 16
MAX_LOGPROBS = 100
PREFILL_STEP_SIZE = 512
# Larger values are mistakes that would fill the memory. Logits divided by a temperature below
# `MIN_TEMP` may be infinite in float32.
MAX_LAYERS = 1000
MAX_SIZE = 2**24
MAX_CONTEXT = 2**16
MAX_STOP = 4096  # characters
MIN_TEMP = 1e-5
MAX_TEMP = 1e5
MAX_PENALTY = 1000
MAX_BIAS = 10_000


# An edge's log probability is clipped to this range. It is below zero by more than float32 rounds,
# so a child always scores less than its parent, and the ancestors of the best nodes are among them.
MIN_EDGE_LOGPROB = -20.0
MAX_EDGE_LOGPROB = -1e-3


@dataclass(frozen=True)
class Allowed:
    """The values that a setting may have; with `choices` the bounds are not looked at."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    smallest: float = 0.0  # of those above 0
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether `value` is allowed; NaN and infinity never are, and bool is not a number."""
        if self.choices:  # 1 == True
            return any(isinstance(value, type(one)) and value == one for one in self.choices)
        if not isinstance(value, Integral if self.whole else Real) or isinstance(value, bool):
            return False
        number: Any = value
        inside = self.least <= number <= self.most and self.above < number < self.below
        is_finite = isinstance(number, Integral) or math.isfinite(number)
        return inside and is_finite and not 0 < number < self.smallest

    def in_words(self) -> str:
        """The allowed values for messages, such as "1 to 256" or "one of a, b"."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.smallest:
            return f"0, or {self.smallest:g} to {self.most:g}"
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"{self.least} to {self.most}"
        bounds = {
            "more than {}": self.above,
            "{} or more": self.least,
            "less than {}": self.below,
            "at most {}": self.most,
        }
        said = [text.format(bound) for text, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(said) or "a number"


def setting(
    default: Any = MISSING,  # without one, the field is required
    help: str = "",  # what `--help` says of it; a field without one is no option
    *,
    option: str = "",  # what gives the value, by default `--` and the field's name
    key: str = "",  # of the option's key=value words; in a `DrafterConfig`, of that drafter's words
    drafter: str = "",  # that a key of --drafter belongs to, if it is not for all
    metavar: str = "",  # what `--help` shows for the value
    group: str = "",  # the title of its group of options; a command chooses one if it is empty
    needs: str = "",  # what it has no effect without, such as "--temp above 0"
    wire: tuple[str, ...] = (),  # its names in a request to the server
    **allowed: Any,  # fields of `Allowed`, of numbers and choices
) -> Any:
    """Make a field of a settings class with all that is known of it: checks, messages, options,
    keys of --drafter and fields of requests are made of this."""
    about = {"help": help, "option": option, "key": key, "drafter": drafter, "metavar": metavar}
    more = {"group": group, "needs": needs, "wire": wire, "allowed": Allowed(**allowed)}
    return field(default=default, metadata=about | more)


class SettingType(NamedTuple):
    """What a field's annotation says of its values."""

    item: Any  # the type of a value, or of each value in `container`; of a Mapping's values
    container: type | None  # tuple, or Sequence or Mapping of `collections.abc`
    is_optional: bool  # whether it may be None

    @property
    def is_row(self) -> bool:
        return self.container in (tuple, abc.Sequence)


@cache
def setting_types(settings: type) -> dict[str, SettingType]:
    """The types of a settings class's fields, by name."""
    return {name: _setting_type(hint) for name, hint in get_type_hints(settings).items()}


def _setting_type(hint: Any) -> SettingType:
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    own = next(one for one in arms if one is not NoneType)
    container: Any = get_origin(own)
    if container not in (tuple, abc.Sequence, abc.Mapping):
        return SettingType(own, None, NoneType in arms)
    inner = get_args(own)
    item = inner[1] if container is abc.Mapping else inner[0]
    return SettingType(item, container, NoneType in arms)


def allowed_values(settings: type, one: Field[Any]) -> Allowed | None:
    """The values that a field of `settings` may have; None for texts, mappings and all else that is
    neither a number nor a choice."""
    allowed: Allowed | None = one.metadata.get("allowed")
    kind = setting_types(settings)[one.name]
    is_number = kind.item in (int, float) and kind.container is not abc.Mapping
    if allowed is None or not (allowed.choices or is_number):
        return None
    return replace(allowed, whole=kind.item is int)


def flag_of(one: Field[Any]) -> str:
    """The option that gives a setting, alone or by a key; empty for a key of a `DrafterConfig`."""
    own = "" if key_of(one) else "--" + one.name.replace("_", "-")
    return one.metadata["option"] or own


def key_of(one: Field[Any]) -> str:
    """The setting's key in its option's `key=value` words; empty if it has an option of its own."""
    return str(one.metadata.get("key", ""))


def option_template(one: Field[Any]) -> str:
    """How a setting is given, with {} for its value: "--top-p {}", "--penalty repetition={}" or
    '--drafter "streams head={}"'."""
    words = f"{key_of(one)}={{}}" if key_of(one) else "{}"
    if drafter := one.metadata["drafter"]:
        words = f'"{drafter} {words}"'
    return f"{flag_of(one)} {words}".lstrip()


def check_settings(
    config: Any,
    *,
    found: str = "{option}",  # what was found: {option} is option and value, beside {name}, {value}
    do: str | None = None,  # None: to choose an allowed value
) -> None:
    """Check the numbers and choices of every field that `setting` made; of a tuple or sequence,
    each one."""
    settings: Any = type(config)
    for one in fields(config):
        kind = setting_types(settings)[one.name]
        allowed = allowed_values(settings, one)
        values = getattr(config, one.name)
        if allowed is None or (values is None and kind.is_optional):
            continue
        option = option_template(one)
        for value in values if kind.is_row and isinstance(values, list | tuple) else [values]:
            shown = {"option": option.format(value), "name": one.name, "value": value}
            number = "a whole number" if allowed.whole else "a number"
            default = "choose one of them" if allowed.choices else f"choose {number} in that range"
            require(
                allowed.holds(value),
                found.format(**shown),
                expected=allowed.in_words(),
                do=do or default,
            )


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """The settings of streams and LoRA, as an adapter's streams_config.json has them."""

    # gamma, the speculative streams per node; 0 for LoRA alone
    num_streams: int = setting(least=0, most=MAX_DRAFT_TOKENS)
    num_msa_layers: int = setting(least=1)  # Ns, the top layers with multi-stream attention
    # N, the base model's layers; streams start before layer N - Ns
    num_layers: int = setting(least=1, most=MAX_LAYERS)
    hidden_size: int = setting(least=1, most=MAX_SIZE)  # D, the base model's width
    # f of eq. 3: "identity" f(h) = h, "low_rank" f(h) = B A h, "residual" f(h) = h + B A h.
    stream_init: StreamInit = setting("identity", choices=STREAM_INITS)
    stream_init_rank: int = setting(0, least=0, most=MAX_SIZE)  # eta, the rank of f; 0 for identity
    # rank of what the root token and the last hidden state before it add to f; 0 if streams
    # start from f alone
    root_init_rank: int = setting(0, least=0, most=MAX_SIZE)
    # whether they were also trained without that: with `schedule=fused` they start before the root
    # is known
    starts_without_root: bool = setting(False, choices=(False, True))
    # theta, the rank of the early-exit adapter; 0 if there is none
    prune_rank: int = setting(0, least=0, most=MAX_SIZE)
    # r, the rank of `ssmlx.model.condition`, which scores a stream's candidates given the token
    # before them; 0 if there is none
    condition_rank: int = setting(0, least=0, most=MAX_SIZE)
    # "all", LoRA acts on every row; "streams", on stream rows alone, which leaves the base
    # model's output untouched
    adapter_scope: AdapterScope = setting("all", choices=ADAPTER_SCOPES)
    # text with `{prompt}` that the adapter was trained on, a prompt at a time; None for chats
    prompt_template: str | None = None
    end_token_ids: tuple[int, ...] = ()  # tokens that end an answer, beside the tokenizer's own
    base_model: str = ""  # name of the model that the adapter was trained on
    # what distinguishes streams: "embeddings", P_j of eq. 3; "value_rotation", their values in
    # attention, rotated by eq. 7 (appendix B), without any parameters.
    stream_design: StreamDesign = setting("embeddings", choices=STREAM_DESIGNS)
    # epsilon of eq. 7, radians by which each stream's values are rotated further than its
    # predecessor's; 0 for embeddings. The paper bounds it by pi / (2 N), N being the longest
    # sequence and its streams together, which is tiny; here any angle up to pi / 2 is allowed.
    rotation_step: float = setting(0.0, least=0, most=math.pi / 2)
    # Vd, tokens that streams draft from; 0 for the whole vocabulary
    draft_vocab_size: int = setting(0, least=0, most=MAX_SIZE)
    # most last tokens that streams see, beside the first few of a text
    stream_window: int = setting(256, least=2, most=MAX_CONTEXT)
    # by nodes of the best tree, tokens that a call advances by on text such as the adapter was
    # trained for; None if not measured. It is a forecast, so adapters that differ in it are equal.
    tokens_per_call: Mapping[int, float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        do = "check the checkpoint's streams_config.json"
        check_settings(self, found="{name} is {value!r}", do=do)
        template = self.prompt_template
        ends: Any = self.end_token_ids
        rotates = self.stream_design == "value_rotation"
        for ok, found, expected in (
            (
                self.num_msa_layers <= self.num_layers,
                f"num_msa_layers is {self.num_msa_layers} of {self.num_layers} layers",
                "at most the number of layers",
            ),
            (
                (self.stream_init == "identity") == (self.stream_init_rank == 0),
                f"stream_init {self.stream_init!r} has rank {self.stream_init_rank}",
                "rank 0 for identity and a positive rank otherwise",
            ),
            (
                template is None or (isinstance(template, str) and "{prompt}" in template),
                f"prompt_template is {template!r}",
                "a text with {prompt} where the prompt goes",
            ),
            (
                isinstance(ends, list | tuple) and all(isinstance(one, int) for one in ends),
                f"end_token_ids is {ends!r}",
                "a list of token ids",
            ),
            (
                rotates == (self.rotation_step > 0),
                f"stream_design {self.stream_design!r} has rotation_step {self.rotation_step!r}",
                "more than 0 and at most pi / 2" if rotates else "0",
            ),
        ):
            require(ok, found, expected=expected, do=do)
        # JSON's names are texts.
        object.__setattr__(
            self, "tokens_per_call", _check_and_sort_tokens_per_call(self.tokens_per_call)
        )

    @property
    def has_embeddings(self) -> bool:
        return self.stream_design == "embeddings" and self.num_streams > 0

    @property
    def insertion_layer(self) -> int:
        """N - Ns, the layer before which streams are inserted."""
        return self.num_layers - self.num_msa_layers

    def checked_num_streams(self, asked: int | None) -> int:
        """G, the streams to use: all for None; InputError also if none were trained."""
        streams = self.num_streams if asked is None else asked
        require(
            1 <= streams <= self.num_streams,
            f"--num-streams {streams}",
            expected=f"1 to {self.num_streams}, as many as the adapter was trained with",
            do="choose a number in that range, or another --adapter",
        )
        return streams

    def to_dict(self) -> dict[str, Any]:
        """The settings as streams_config.json has them; `tokens_per_call` only if it is known."""
        unknown = ["tokens_per_call"] if self.tokens_per_call is None else []
        return {name: value for name, value in vars(self).items() if name not in unknown}


def _check_and_sort_tokens_per_call(values: Any) -> dict[int, float] | None:
    """`tokens_per_call` checked and sorted by nodes, with numbers for JSON's text keys."""
    if values is None:
        return None
    pairs = dict(values).items() if isinstance(values, Mapping) else [("", 0.0)]
    nodes = Allowed(least=2, most=MAX_TREE_NODES, whole=True)
    tokens = Allowed(least=1, most=MAX_TREE_NODES)
    require(
        bool(pairs)
        and all(
            str(name).isdecimal()
            and len(str(name)) < 5
            and nodes.holds(int(name))
            and tokens.holds(value)
            for name, value in pairs
        ),
        f"tokens_per_call is {values!r}"[:80],
        expected='tokens per call of 1 or more by nodes of 2 or more, such as {"4": 1.8}',
        do="check the checkpoint's streams_config.json",
    )
    return {int(name): float(value) for name, value in sorted(pairs, key=lambda one: int(one[0]))}


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """The shape of the draft tree.

    Attributes:
        kind: "full", every combination of the `width` likeliest tokens of each stream
            (1 + k + k^2 + ... nodes, section 3.2.2); "best", the `size` nodes with the largest
            product of stream probabilities.
        width: k, children a level. For "best" an upper bound.
        size: nodes of the best tree, the root included; ignored for "full".
    """

    kind: TreeKind = setting(
        "best",
        "the tree that streams and Medusa heads draft. full: K children for every node; best: the "
        "N likeliest nodes",
        choices=get_args(TreeKind),
        option="--tree",
    )
    width: int | None = setting(
        None,
        f"K, most children of a node (default: {FULL_WIDTH} for full, no limit for best)",
        least=1,
        option="--tree-width",
        metavar="K",
    )
    size: int = setting(
        16,
        "N, nodes of the best tree with its root",
        least=1,
        most=MAX_TREE_NODES,
        option="--tree-size",
        needs="--tree best",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def no_wider_than(self, num_tokens: int) -> TreeConfig:
        """A copy with at most `num_tokens` children a level, as many as can be drafted; its `width`
        is a number."""
        width = self.full_width if self.kind == "full" else self.width or num_tokens
        return replace(self, width=min(width, num_tokens))

    def num_nodes(self, num_streams: int) -> int:
        """N, the nodes of a drafted tree, the root included.

        Args:
            num_streams: G, levels below the root.

        Raises:
            InputError: a full tree would have more than `MAX_TREE_NODES`.
        """
        if self.kind == "best":
            return self.size
        nodes: int = sum(self.full_width**level for level in range(num_streams + 1))
        require(
            nodes <= MAX_TREE_NODES,
            f"a full tree of {self.full_width} children and {num_streams} levels has {nodes} nodes",
            expected=f"at most {MAX_TREE_NODES}",
            do="lower --tree-width, or use --tree best",
        )
        return nodes

    @property
    def full_width(self) -> int:
        """k of a full tree."""
        return self.width or FULL_WIDTH


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """How the tree is pruned before streams are inserted (Speculative Streaming, 3.2.3).

    Attributes:
        kind: "off"; "budget", which keeps the `keep` nodes with the largest early-exit path
            probability, a fixed shape; "threshold", the paper's rule, which keeps every node whose
            edges all have at least probability `threshold`.
        keep: M, nodes that a budget keeps, the root included.
        threshold: least early-exit probability of a child given its parent.
    """

    kind: PruneKind = setting(
        "off",
        "remove unlikely nodes before the upper layers. budget: keep the M likeliest; threshold=P: "
        "keep nodes with a probability of at least P given their parent (threshold alone: "
        f"{PRUNE_THRESHOLD})",
        choices=get_args(PruneKind),
        option="--prune",
        metavar="HOW",
    )
    keep: int = setting(
        8,
        "M, nodes that --prune budget keeps",
        least=1,
        option="--prune-to",
        metavar="M",
        needs="--prune budget",
    )
    threshold: float = setting(PRUNE_THRESHOLD, least=0, most=1, option="--prune", key="threshold")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Base class of drafter settings; a field's option, "tokens={}", is a key of that drafter."""

    def __post_init__(self) -> None:
        listed = (name for name, one in DRAFTERS.items() if one.settings is type(self))
        name = next(listed, type(self).__name__)
        check_settings(self, found=f'--drafter "{name} {{option}}"')


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(DrafterConfig):
    """What prompt lookup drafts: the tokens that followed an earlier occurrence of the text's last
    tokens.

    Attributes:
        ngram: most last tokens of the text that are looked up; then fewer, down to one.
        num_draft_tokens: tokens that are drafted after each match.
        size: nodes of the tree that the matches form, the root included.
        reference: token ids of an expected text, such as a request's `prediction`, to look up in
            instead of the text so far.
    """

    ngram: int = setting(3, least=1, most=64, key="ngram")
    num_draft_tokens: int = setting(8, least=1, most=MAX_DRAFT_TOKENS, key="tokens")
    size: int = setting(16, least=2, most=MAX_TREE_NODES, key="size")
    reference: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(DrafterConfig):
    """Window and n-gram pool of lookahead decoding (Fu et al. 2024).

    Attributes:
        window: W, guesses that one Jacobi iteration improves at once.
        ngram: N, tokens of an n-gram, the first one included.
        guesses: G, most n-grams that a step verifies, and that the pool keeps for a first token.
        pool_from_prompt: whether the pool starts with the prompt's n-grams.
    """

    window: int = setting(5, least=1, most=128, key="window")
    ngram: int = setting(4, least=2, most=16, key="ngram")
    guesses: int = setting(5, least=1, most=128, key="guesses")
    pool_from_prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = 1 + (self.window + self.guesses) * (self.ngram - 1)
        require(
            nodes <= MAX_TREE_NODES,
            f"lookahead with these settings verifies {nodes} nodes a step",
            expected=f"at most {MAX_TREE_NODES}",
            do="lower window, ngram or guesses",
        )


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DrafterConfig):
    """What a draft model drafts.

    Attributes:
        num_draft_tokens: tokens of the chain, each a forward pass of the draft model.
        width: candidates a level; those beside the chain's are leaves, at no further pass.
    """

    num_draft_tokens: int = setting(3, least=1, most=MAX_DRAFT_TOKENS, key="tokens")
    width: int = setting(1, least=1, most=32, key="width")


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """How an MTP head drafts.

    Attributes:
        num_draft_tokens: tokens of the chain, each a call of the head.
        hidden: which hidden states the head reads: those after the final norm ("after"), as Qwen's
            heads were trained, or before it ("before"). The states that it reads of its own earlier
            steps are those after or before its own norm.
        norms: how the weights of its norms are stored, see `MtpNorms`.
    """

    num_draft_tokens: int = setting(3, least=1, most=MAX_MTP_TOKENS, key="tokens")
    hidden: MtpHidden = setting("after", choices=get_args(MtpHidden), key="hidden")
    norms: MtpNorms = setting("auto", choices=get_args(MtpNorms), key="norms")


@dataclass(frozen=True, kw_only=True)
class SpeculatorTreeConfig(DrafterConfig):
    """The tree that an MLP speculator drafts (arXiv 2404.19124).

    Attributes:
        widths: branches at each stage, for as many stages; None for the speculator's own widths.
        candidates: k, how many of the likeliest whole paths are kept, with the nodes on them; None
            for the speculator's own number, unless `size` is given.
        size: the likeliest nodes to keep instead, the root included.
    """

    widths: Sequence[int] | None = setting(None, least=1, key="widths")
    candidates: int | None = setting(None, least=1, key="candidates")
    size: int | None = setting(None, least=1, most=MAX_TREE_NODES, key="size")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.candidates is None or self.size is None,
            f'--drafter "mlp-speculator size={self.size} candidates={self.candidates}"',
            expected="one of them",
            do="omit the other",
        )


class ListedDrafter(NamedTuple):
    """What is known of a drafter before its file, and so MLX, is imported."""

    path: str  # "file.Class" in `ssmlx.drafters`
    settings: type[DrafterConfig] | None = None  # its own
    loads: str = ""  # the key of --drafter that names what it drafts with, such as "model=MODEL"


DRAFTERS = {
    "streams": ListedDrafter("stream_drafter.StreamDrafter"),
    "prompt-lookup": ListedDrafter("lookup.PromptLookupDrafter", PromptLookupConfig),
    "lookahead": ListedDrafter("lookahead.LookaheadDrafter", LookaheadConfig),
    "draft-model": ListedDrafter("draft_model.DraftModelDrafter", DraftModelConfig, "model=MODEL"),
    "mtp": ListedDrafter("mtp.MtpDrafter", MtpConfig, "model=MODEL"),
    "medusa": ListedDrafter("heads.MedusaDrafter", None, "heads=FOLDER"),
    "mlp-speculator": ListedDrafter(
        "heads.SpeculatorDrafter", SpeculatorTreeConfig, "heads=FOLDER"
    ),
}
"""All drafters, by the names that `drafter` takes; see `ssmlx.drafters.registry`."""


@dataclass(frozen=True, kw_only=True)
class DrafterLoading:
    """Keys of --drafter that act when a model is loaded: `draft_head` on all its answers,
    `attention` on all models of the process."""

    draft_head: DraftHead = setting(
        "auto",
        "weights of the draft head",
        choices=DRAFT_HEADS,
        option="--drafter",
        drafter="streams",
        key="head",
    )
    attention: Attention = setting(
        "auto",
        "MLX's (mlx), or the fused Metal kernel if faster (auto)",
        choices=ATTENTIONS,
        option="--drafter",
        key="attention",
    )


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """When a drafted token is accepted.

    Attributes:
        kind: "exact", if it is the target's own token: the answer's distribution is the target's.
            "typical", if the target finds it likely enough (Medusa, section 3.3.1): LOSSY, the
            answer is no longer distributed as the target's.
        epsilon: typical acceptance requires at most this probability.
        delta: it requires delta * exp(-entropy) if that is less than epsilon.
    """

    kind: AcceptanceKind = setting(
        "exact",
        "typical also accepts tokens that the model finds likely. LOSSY: it changes answers",
        choices=ACCEPTANCES,
        option="--drafter",
        key="acceptance",
    )
    epsilon: float = setting(0.09, above=0, most=1, option="--drafter", key="epsilon")
    delta: float = setting(0.3, above=0, most=1, option="--drafter", key="delta")

    def __post_init__(self) -> None:
        check_settings(self)


_TEMP: Any = {"least": 0, "smallest": MIN_TEMP, "most": MAX_TEMP}
_REPETITION: Any = {"above": 0, "most": MAX_PENALTY, "option": "--penalty", "key": "repetition"}
PENALTIES = {"repetition": 1, "presence": 0, "frequency": 0}
"""Each penalty, with the value that changes nothing."""


def _recent(penalty: str) -> Any:
    return setting(
        20,
        f"recent tokens that the {penalty} penalty looks at",
        least=1,
        most=MAX_CONTEXT,
        option="--penalty",
        key="context",
        wire=(f"{penalty}_context_size",),
    )


@dataclass(frozen=True, kw_only=True)
class ModelSampling:
    """The sampling that a model's generation_config.json asks for; greedy unless it says so."""

    temp: float = setting(0.0, **_TEMP)
    top_p: float = setting(0.0, least=0, most=1)
    min_p: float = setting(0.0, least=0, most=1)
    top_k: int = setting(0, least=0)
    repetition_penalty: float = setting(1.0, **_REPETITION)

    def __post_init__(self) -> None:
        check_settings(self, found="{name} is {value!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is sampled from the target's logits; names and order of steps are mlx-lm's.

    Attributes:
        temp: temperature; 0 is greedy, and leaves top_p, min_p, top_k and seed without effect. If
            this or one of the next three is None, the model's generation_config.json decides, or it
            is 0 if that says nothing of sampling.
        top_p: sample from the likeliest tokens that together have this probability; 0 and 1 take
            all.
        min_p: sample from tokens with at least this share of the likeliest one's probability.
        top_k: sample from the `top_k` likeliest tokens; 0 takes all.
        seed: of the sampling noise. The noise at a position of the text depends on the seed and the
            position alone, so the same seed gives the same text with plain and speculative
            decoding, any drafter, tree and pruning. None takes a new one from MLX's random state.
        repetition_penalty: divides (negative: multiplies) the logits of recent tokens; 1 is off.
            If None, the model's generation_config.json decides if tokens are sampled, else off.
        repetition_context_size: recent tokens that it looks at.
        presence_penalty: subtracted from the logit of every recent token.
        presence_context_size: recent tokens that it looks at.
        frequency_penalty: subtracted from a recent token's logit for each of its occurrences.
        frequency_context_size: recent tokens that it looks at.
        logit_bias: added to the logits of single tokens, by id.
        logprobs: report the log probability of every token, and of this many likeliest ones
            beside it, in the model's distribution under bias and penalties, before temperature and
            filters; None reports nothing, and costs nothing.
    """

    temp: float | None = setting(
        None,
        "temperature; 0 takes the likeliest token (default: the model's, or 0)",
        metavar="T",
        group="sampling",
        wire=("temp", "temperature"),
        **_TEMP,
    )
    top_p: float | None = setting(
        None,
        "sample from the likeliest tokens that together have probability P",
        least=0,
        most=1,
        metavar="P",
        group="sampling",
        needs="--temp above 0",
        wire=("top_p",),
    )
    min_p: float | None = setting(
        None,
        "sample from tokens with at least P of the likeliest one's probability",
        least=0,
        most=1,
        metavar="P",
        group="sampling",
        needs="--temp above 0",
        wire=("min_p",),
    )
    top_k: int | None = setting(
        None,
        "sample from the K likeliest tokens",
        least=0,
        metavar="K",
        group="sampling",
        needs="--temp above 0",
        wire=("top_k",),
    )
    seed: int | None = setting(
        None,
        "same seed, same answer with any drafter (in float32; default: random)",
        least=0,
        most=2**64 - 1,
        group="sampling",
        needs="--temp above 0",
    )
    repetition_penalty: float | None = setting(
        None,
        "divide the logits of recent tokens by X; 1 is off",
        wire=("repetition_penalty",),
        **_REPETITION,
    )
    repetition_context_size: int = _recent("repetition")
    presence_penalty: float | None = setting(
        None,
        "subtract X from the logits of recent tokens",
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        option="--penalty",
        key="presence",
        wire=("presence_penalty",),
    )
    presence_context_size: int = _recent("presence")
    frequency_penalty: float | None = setting(
        None,
        "subtract X from the logits of recent tokens, each time they occur",
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        option="--penalty",
        key="frequency",
        wire=("frequency_penalty",),
    )
    frequency_context_size: int = _recent("frequency")
    logit_bias: Mapping[int, float] | None = setting(
        None, "add X to the logit of token ID", metavar="ID=X", group="sampling"
    )
    logprobs: int | None = setting(
        None,
        "with --jsonl: log probabilities of every token and of the N likeliest ones",
        least=0,
        most=MAX_LOGPROBS,
        needs="--jsonl",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        biases: Any = self.logit_bias or {}  # -inf forbids a token
        found = f"logit_bias is {quoted(biases)}"
        expected = "a number by token id"
        require(isinstance(biases, Mapping), found, expected=expected, do="give a mapping")
        for token, bias in dict[Any, Any](biases).items():
            require(
                isinstance(token, Integral)
                and int(token) >= 0
                and isinstance(bias, Real)
                and float(bias) <= MAX_BIAS,
                f"--logit-bias {token}={bias}",
                expected=f"a token id and a number of at most {MAX_BIAS}",
                do="write TOKEN=BIAS",
            )

    def numbers(self, model: ModelSampling | None = None) -> ModelSampling:
        """Temperature, filters and repetition penalty: each these settings' own, else that of
        `model`, else that of greedy decoding."""
        names = [one.name for one in fields(ModelSampling)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        found = replace(model or ModelSampling(), **given)
        # A model's penalty belongs to its sampling: greedy decoding takes the likeliest token.
        return found if found.temp else replace(found, **{"repetition_penalty": 1.0, **given})

    def following(self, model: ModelSampling) -> Self:
        """A copy whose sampling fields that are None come from `model`; under greedy decoding an
        unset repetition penalty becomes 1."""
        return replace(self, **vars(self.numbers(model)))

    @property
    def context_size(self) -> int:
        """The longest context of the penalties that are on; 0 without penalties."""
        sizes = [
            getattr(self, f"{name}_context_size")
            for name, off in PENALTIES.items()
            if getattr(self, f"{name}_penalty") not in (None, off)
        ]
        return max(sizes, default=0)


@cache
def settings_fields(config: type) -> dict[str, tuple[type, ...]]:
    """The fields that hold settings objects, each with the classes allowed there, NoneType too."""
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(config).items()}
    return {name: own for name, own in kinds.items() if any(map(is_dataclass, own))}


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """How to generate; the API and all commands take the same settings.

    If decoding, tree, prune, num_streams and stream_schedule are all None, acceptance is exact and
    the model is not split over processes, a controller (`ssmlx.policy.controller`) decides for each
    call what is drafted, if anything, by the costs of calls on this machine and the share of
    drafted tokens that were accepted. Otherwise every call is made as the settings say.

    Attributes:
        decoding: "speculative", which drafts for every call, or "plain"; None lets the controller
            decide.
        max_tokens: most tokens to generate.
        stop: texts that end an answer. They are not in its text, but the tokens up to the one that
            completes such a text are in its tokens.
        drafter: one of `ssmlx.settings.DRAFTERS`; None takes the draft model that is passed beside
            these settings, or the heads, or the model's streams if it has any, or a head among the
            model's own files or in the Hub's cache.
        tree: the tree that streams and Medusa heads draft; None for `TreeConfig()`.
        prune: the pruning of any drafter's tree but lookahead's; needs a pruning adapter. None
            for off.
        num_streams: streams to use, at most as many as were trained; None for all.
        stream_schedule: when they run, see `StreamDrafter`: "fused" or "second-pass"; None for
            "second-pass".
        prompt_lookup, lookahead, draft, speculator_tree: settings of the other drafters.
        drafter_settings: settings of a drafter that has no field here, of the class that it
            registered; None for its defaults.
        acceptance: when a drafted token counts; all but the default is lossy.
        prefill_step_size: prompt tokens per forward pass.
        deterministic: make the same calls in every run: no learned cost or acceptance is used, and
            none is learned; no processed prompt of another answer is reused, but a chat's own turns
            are; sampling without a seed takes seed 0. Machines may still round differently.
    """

    decoding: Decoding | None = setting(
        None,
        "speculative drafts for every call, plain never (default: the faster way)",
        choices=DECODINGS,
        metavar="HOW",
        group="decoding",
    )
    max_tokens: int = setting(
        256,
        "generate at most N tokens",
        least=1,
        group="decoding",
        wire=("max_tokens", "max_completion_tokens"),
    )
    stop: Sequence[str] = setting(
        (),
        "end the answer before TEXT (\\n is a new line)",
        metavar="TEXT",
        group="decoding",
    )
    drafter: str | None = setting(None, choices=tuple(DRAFTERS))
    tree: TreeConfig | None = None
    prune: PruneConfig | None = None
    num_streams: int | None = setting(
        None,
        "streams to use, each of which drafts one token ahead (default: all)",
        metavar="G",
        group="draft tree",
    )
    stream_schedule: StreamSchedule | None = setting(
        None,
        "run streams in a pass of their own (second-pass) or in the verifying one (fused)",
        choices=STREAM_SCHEDULES,
        option="--drafter",
        drafter="streams",
        key="schedule",
    )
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    draft: DraftModelConfig = field(default_factory=DraftModelConfig)
    speculator_tree: SpeculatorTreeConfig = field(default_factory=SpeculatorTreeConfig)
    drafter_settings: Any = None
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    prefill_step_size: int = setting(PREFILL_STEP_SIZE, least=1, most=2**20)
    deterministic: bool = setting(
        False,
        "make the same calls in every run: use no measured costs, and seed 0",
        group="sampling",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kinds in settings_fields(GenerateConfig).items():
            part = getattr(self, name)
            require(
                isinstance(part, kinds),
                f"{name} is {quoted(part)}",
                expected=kinds[0].__name__,
                do="make one, or leave it out",
            )
        require(
            self.acceptance.kind == "exact" or self.temp != 0,
            "acceptance=typical with greedy decoding",
            expected="--temp above 0",
            do="give --temp, or omit acceptance=",
        )
        # A text is a sequence of texts, too: of its characters, which is never meant.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        is_fine = isinstance(stop, list | tuple)
        do = "give some text, or omit the option"
        require(is_fine, f"stop is {quoted(stop)}", expected="texts", do=do)
        object.__setattr__(self, "stop", tuple(stop))
        for text in stop:
            require(
                isinstance(text, str) and 0 < len(text) <= MAX_STOP,
                f"--stop {quoted(text)}",
                expected="some text",
                do=do,
            )

    @property
    def is_controlled(self) -> bool:
        """Whether a controller decides what is drafted."""
        shape = (self.tree, self.prune, self.num_streams, self.stream_schedule)
        is_open = all(one is None for one in shape)
        return is_open and self.decoding is None and self.acceptance.kind == "exact"

    def with_default_shape(self) -> GenerateConfig:
        """A copy whose shape is given, so that no controller decides, and drafts are the same on
        every machine."""
        return replace(
            self,
            tree=self.tree or TreeConfig(),
            prune=self.prune or PruneConfig(),
            stream_schedule=self.stream_schedule or "second-pass",
        )


WIRE_NAMES = {
    wire: one.name for one in fields(GenerateConfig) for wire in one.metadata.get("wire", ())
}
"""Settings by the names that requests and callers have for them, OpenAI's or mlx-lm's. If a request
has two names of one setting, the one that is later in this table counts."""

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}
"""Settings by names that transformers, llama.cpp or Ollama have for them. They are not followed, as
values can mean something else, but whoever gives one is referred to the setting."""

_NOT_QUANTIZED = "omit it: keys and values are not quantized"
_OF_TEMPLATE = "give it to ssmlx.prompt_tokens, as {}"
INSTEAD = {
    "chat_template_kwargs": _OF_TEMPLATE.format("template_args={...}"),
    "do_sample": "use temp=: 0 for greedy decoding",
    "draft_model": "use drafter=ssmlx.load_draft_model(...)",
    "enable_thinking": _OF_TEMPLATE.format("template_args={'enable_thinking': ...}"),
    "input_embeddings": "give the prompt as tokens",
    "kv_bits": _NOT_QUANTIZED,
    "kv_group_size": _NOT_QUANTIZED,
    "logits_processors": "give it to ssmlx.stream_generate, or use mask= of Engine.stream",
    "max_kv_size": "omit it: no part of a text is dropped; memory_gb= of Engine limits memory",
    "messages": _OF_TEMPLATE.format("its first argument") + ", or to Engine.chat",
    "num_draft_tokens": "use draft=ssmlx.DraftModelConfig(num_draft_tokens=...)",
    "prompt_cache": "use cache=, or ssmlx.ChatSession or Engine.chat, which keep their own",
    "prompt_progress_callback": "use progress=",
    "quantized_kv_start": _NOT_QUANTIZED,
    "sampler": "give it to ssmlx.stream_generate, or use mask= of Engine.stream",
    "stream": "use ssmlx.stream_generate",
    "system": _OF_TEMPLATE.format("a turn of the role system") + ", or to Engine.chat",
    "tools": _OF_TEMPLATE.format("tools="),
    "xtc_probability": "use sampler=mlx_lm.sample_utils.make_sampler(...)",
    "xtc_threshold": "use sampler=mlx_lm.sample_utils.make_sampler(...)",
}
"""What to do about arguments of mlx-lm and others that are no settings here. Each may be None: that
asks for nothing."""


INSTEAD_OF_LOADS = {
    "adapter_path": "use adapter=",
    "lazy": "omit it: weights are loaded at once",
    "model_config": "omit it, or change config.json in a copy of the folder",
    "path_or_hf_repo": "give it as model=, or as the first argument",
    "return_config": "omit it, and read the folder's config.json",
    "revision": "omit it, and write the model as org/name@revision",
    "tokenizer_config": "omit it: a tokenizer is loaded as its files say",
    "trust_remote_code": "omit it: code that comes with a model is never run",
}
"""The same for mlx-lm's `load`. Each may be false or empty: that asks for nothing."""


def refuse_arguments_of_load(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse all but what asks for nothing."""
    for name, value in given.items():
        if value or name not in INSTEAD_OF_LOADS:
            raise _unknown_argument(name, "an argument of ssmlx.load", INSTEAD_OF_LOADS, known)


def with_settings(config: GenerateConfig | None, given: Mapping[str, Any]) -> GenerateConfig:
    """`config`, or the defaults, with single fields by the names that `WIRE_NAMES` has too."""
    known = {one.name: one.name for one in fields(GenerateConfig)} | WIRE_NAMES
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in INSTEAD and value is None:
            continue
        if name not in known:
            raise _unknown_argument(name, "a field of ssmlx.GenerateConfig", INSTEAD, known)
        require(
            known[name] not in found,
            f"{name}= beside another name of {known[name]}",
            expected="one of them",
            do="omit one",
        )
        found[known[name]] = value
    return replace(config or GenerateConfig(), **found)


def _unknown_argument(
    name: str, expected: str, instead: Mapping[str, str], known: Iterable[str]
) -> InputError:
    close = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, known, n=1)
    do = instead.get(name) or (f"use {close[0]}=" if close else "omit it")
    return InputError(f"{one_line(name)}= is not known", expected=expected, do=do)


def field_of_drafter_settings(kind: type[DrafterConfig]) -> str:
    """The field of `GenerateConfig` that holds a drafter's settings of that class."""
    found = (name for name, own in settings_fields(GenerateConfig).items() if kind in own)
    return next(found, "drafter_settings")
