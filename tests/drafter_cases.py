"""A case for each drafter: its settings, and what it loads."""

from functools import lru_cache

from tiny import (
    make_base,
    make_model,
)
from tiny_heads import make_heads

from ssmlx.drafters.draft_model import (
    DraftModel,
)
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import (
    DraftModelConfig,
    LookaheadConfig,
    PruneConfig,
    SpeculatorTreeConfig,
    TreeConfig,
)

BUDGET = PruneConfig(kind="budget", keep=4)
THRESHOLD = PruneConfig(kind="threshold", threshold=0.05)
FEW_TOKENS = (0, 1, 2, 4, 7, 8, 12)
SMALL_LOOKAHEAD = LookaheadConfig(window=3, ngram=3, guesses=3)


@lru_cache(maxsize=4)
def bare_model(architecture="llama"):
    return StreamFusedModel(Backbone(make_base(architecture)))


@lru_cache(maxsize=2)
def streams_model(**adapter):
    return make_model("llama", "streams", adapter=adapter)


def drafter_settings():
    """Settings by name; the draft model is another than the target."""
    draft = DraftModel(make_base(seed=50))
    backbone = bare_model().backbone
    medusa = make_heads("medusa", backbone, num_layers=2, shared_heads=(1,))
    stages = make_heads("mlp-speculator", backbone, top_k_tokens_per_head=(4, 3, 2))
    small = SpeculatorTreeConfig(size=9)
    few = make_heads("mlp-speculator", backbone, vocab=FEW_TOKENS, tie_weights=True)
    return {
        "streams": {"drafter": "streams", "tree": TreeConfig(size=8)},
        "streams, budget": {"drafter": "streams", "prune": BUDGET},
        "conditional streams": {"drafter": "streams", "tree": TreeConfig(size=8)},
        "conditional streams, full": {"tree": TreeConfig(kind="full", width=2)},
        "conditional streams, budget": {"prune": BUDGET},
        "prompt-lookup": {"drafter": "prompt-lookup"},
        "prompt-lookup, threshold": {"drafter": "prompt-lookup", "prune": THRESHOLD},
        "lookahead": {"drafter": "lookahead", "lookahead": SMALL_LOOKAHEAD},
        "draft-model": {"drafter": draft},
        "draft-model, wide": {"drafter": draft, "draft": DraftModelConfig(width=3)},
        "medusa": {"drafter": medusa},
        "medusa, full": {"drafter": medusa, "tree": TreeConfig(kind="full", width=2)},
        "medusa, few tokens": {"drafter": make_heads("medusa", backbone, vocab=FEW_TOKENS)},
        "medusa, budget": {"drafter": medusa, "prune": BUDGET},
        "mlp-speculator": {"drafter": stages},
        "mlp-speculator, few tokens": {"drafter": few, "speculator_tree": small},
        "mlp-speculator, threshold": {"drafter": stages, "prune": THRESHOLD},
    }


DRAFTERS = tuple(drafter_settings())
