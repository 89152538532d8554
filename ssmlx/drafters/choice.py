"""The drafter that the settings ask for."""

from __future__ import annotations

from ..decoding.drafter import Drafter
from ..decoding.loop import scratch_rows
from ..decoding.sampling import Sampling
from ..errors import InputError
from ..model.streams import StreamFusedModel
from ..plan import GenerateConfig
from ..settings import HEAD_DRAFTERS, TEXT_DRAFTERS, DrafterKind
from ..tuning.profile import settled
from .draft_model import DraftModelDrafter
from .head_drafter import HeadDrafter
from .lookahead import LookaheadDrafter
from .lookup import PromptLookupDrafter, WithLookup
from .streams import StreamDrafter


def required_scratch(model: StreamFusedModel, config: GenerateConfig) -> int:
    """Rows that a step may have, for sizing a cache once; 0 for plain decoding.

    Raises:
        InputError: the settings do not fit the model.
    """
    drafter = make_drafter(model, config)
    return scratch_rows(drafter) if drafter else 0


def _check_prune(model: StreamFusedModel, config: GenerateConfig, drafter: DrafterKind) -> None:
    kind = config.prune.kind if config.prune else "off"
    if kind != "off" and drafter == "lookahead":
        raise InputError(
            f"--prune {kind} with --drafter lookahead, whose window must reach the target whole",
            expected="--prune off",
            do="drop --prune",
        )
    if kind != "off" and (model.streams is None or model.streams.prune is None):
        raise InputError(
            f"--prune {kind}, but the adapter has no pruning adapter",
            expected="prune_adapter.* among its stream weights",
            do="use --prune off, or train one",
        )


def make_drafter(
    model: StreamFusedModel, config: GenerateConfig, sampling: Sampling | None = None
) -> Drafter | None:
    """The drafter that `config` asks for; None for plain decoding.

    Args:
        model: the target.
        config: the settings.
        sampling: how the target decides, for drafters that follow it.

    Raises:
        InputError: the settings do not fit the model.
    """
    kind = config.resolved_drafter(model)
    if kind is None:
        return None
    config = settled(config, model)
    _check_prune(model, config, kind)
    if config.lookup_nodes and kind in TEXT_DRAFTERS:
        raise InputError(
            f"--lookup-nodes with --drafter {kind}",
            expected="streams or heads, whose trees they go into",
            do="drop one of the two",
        )
    if kind == "prompt-lookup":
        return PromptLookupDrafter(config.prompt_lookup)
    if kind == "lookahead":
        return LookaheadDrafter(config.lookahead)
    if kind == "draft-model":
        assert config.draft_model is not None
        return DraftModelDrafter(config.draft_model, config.draft, sampling)
    if kind in HEAD_DRAFTERS:
        drafter = _head_drafter(model, config)
    else:
        assert model.config is not None
        assert config.tree is not None and config.stream_schedule is not None
        streams = model.config.usable_streams(config.num_streams)
        more, schedule = config.lookup_nodes, config.stream_schedule
        drafter = StreamDrafter(model, config.tree, streams, schedule, more_levels=more)
    return WithLookup(drafter, config.lookup_nodes) if config.lookup_nodes else drafter


def _head_drafter(model: StreamFusedModel, config: GenerateConfig) -> Drafter:
    heads = config.heads
    assert heads is not None
    tree = config.tree if heads.drafter == "medusa" else config.speculator_tree
    return HeadDrafter(model.backbone, heads, tree)
