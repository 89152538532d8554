"""What may be drafted on a machine that nobody calibrated: trees of rising size, with prices."""

from collections.abc import Mapping
from functools import lru_cache

from ..decoding.pace import Rung
from ..model.streams import StreamFusedModel
from ..settings import StreamConfig, TreeConfig
from .chips import Chip, Decoder, chip_named, costs
from .cost import DraftShape, StepCosts, interpolate
from .profile import profile_of, this_machine

SIZES = (2, 3, 4, 6, 8, 12, 16)
TYPICAL: Mapping[int, float] = {2: 1.5, 3: 1.8, 4: 2.05, 6: 2.4, 8: 2.55, 12: 2.7, 16: 2.8}
"""Tokens per call by nodes, for adapters that do not say: about the middle of those that ship."""
USUAL_CONTEXT = 128
"""Tokens before an answer, where nobody says."""
_LONG = (256, 1024, 3072)
"""Tokens at which a text is of another kind: streams may guess worse behind long ones."""


def this_chip() -> Chip:
    """That of this machine, or the nearest that something is known of."""
    return chip_named(this_machine()[0])


def expected_costs(model: StreamFusedModel) -> StepCosts:
    """What steps should cost here, by what others published."""
    return _expected(Decoder.of(model), this_chip())


_expected = lru_cache(maxsize=32)(costs)


def known_costs(model: StreamFusedModel) -> StepCosts:
    """What steps cost here: as a profile of this machine has it, else as they should."""
    profile = profile_of(model) if model.num_streams else None
    return expected_costs(model) if profile is None else profile.costs


def text_kind(context: int) -> str:
    """What texts behind so many tokens have in common: how many there are at least."""
    return str(max((one for one in _LONG if context >= one), default=0))


def ladder(model: StreamFusedModel, costs: StepCosts, context: float) -> list[Rung]:
    """Shapes to draft in, the smallest first."""
    config = model.config
    assert config is not None
    trees = shapes(model.num_streams)
    return [priced(one, tokens_of(one, config), costs, context) for one in trees]


def shapes(num_streams: int) -> list[DraftShape]:
    """A tree of each size, with no more streams than it can have levels."""
    return [
        DraftShape(tree=TreeConfig(size=size), num_streams=min(num_streams, size - 1))
        for size in SIZES
    ]


def tokens_of(shape: DraftShape, config: StreamConfig) -> float:
    """Tokens per call of a shape, as the adapter tells them."""
    known = {1: 1.0, **(config.tokens_per_call or TYPICAL)}
    nodes = sorted(known)
    return interpolate(nodes, [known[n] for n in nodes], min(shape.num_kept, nodes[-1]))


def priced(shape: DraftShape, tokens: float, costs: StepCosts, context: float) -> Rung:
    plain = costs.plain_seconds(context)
    draft = costs.draft_seconds(shape, context)
    verify = costs.step_seconds(shape, context) - draft
    return Rung(shape=shape, verify=verify / plain, draft=draft / plain, tokens=tokens)
