"""What settings come to: who drafts, in what shape, and who decides."""

from dataclasses import replace

import pytest
from refusals import mentions
from tiny import make_base, make_model, make_tokenizer
from tiny_heads import make_heads

import ssmlx
from ssmlx.commands.drafting import decision
from ssmlx.decoding.draft_shape import Always, DraftShape, Never
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.drafters.text_index import EarlierAnswers
from ssmlx.generation.plan import make_plan
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.policy.controller import PLAIN_CALL, Controller, ExpectedCall
from ssmlx.settings import AcceptanceConfig, PromptLookupConfig, PruneConfig, TreeConfig


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_where_nothing_is_asked_for_a_controller_decides(model):
    plan = make_plan(model)
    streams, text = plan.drafters
    assert isinstance(plan.controller, Controller) and plan.kind == "streams"
    assert streams.largest == DraftShape("streams", 16, model.num_streams)
    assert text.largest == DraftShape("prompt-lookup", 32, 31)
    assert not plan.needs_context_tokens


@pytest.mark.parametrize("drafter", ["streams", "prompt-lookup", "lookahead"])
def test_a_drafter_that_is_named_is_controlled_too(model, drafter):
    plan = make_plan(model, drafter=drafter)
    assert isinstance(plan.controller, Controller)
    assert [one.largest.drafter for one in plan.drafters] == [drafter]


@pytest.mark.parametrize(
    ("asked", "nodes", "levels"),
    [
        ({"decoding": "speculative"}, 16, 3),
        ({"tree": TreeConfig(size=6)}, 6, 3),
        ({"tree": TreeConfig(kind="full", width=2)}, 15, 3),
        ({"num_streams": 2}, 16, 2),
        ({"prune": PruneConfig()}, 16, 3),
        ({"stream_schedule": "fused"}, 16, 3),
        ({"acceptance": AcceptanceConfig(kind="typical"), "temp": 1.0}, 16, 3),
    ],
)
def test_what_is_asked_for_is_obeyed(model, asked, nodes, levels):
    plan = make_plan(model, **asked)
    assert plan.controller == Always(DraftShape("streams", nodes, levels))
    assert plan.expected_fastest_call == PLAIN_CALL and plan.learned is None


def test_text_is_drafted_for_every_model():
    """Its own, earlier answers and an expected one; with heads beside them, too."""
    bare = StreamFusedModel(Backbone(make_base()))
    plan = make_plan(bare)
    assert isinstance(plan.controller, Controller) and plan.kind == "prompt-lookup"
    assert [one.largest.drafter for one in plan.drafters] == ["prompt-lookup"]
    assert (
        not plan.needs_context_tokens
        and make_plan(bare, drafter="prompt-lookup").needs_context_tokens
    )
    expected = PromptLookupConfig(reference=(1, 2, 3))
    heads = make_heads("medusa", bare.backbone)
    plan = make_plan(bare, drafter=heads, earlier=EarlierAnswers(), prompt_lookup=expected)
    names = ["medusa", "prompt-lookup", "earlier-answers", "expected-text"]
    assert [one.largest.drafter for one in plan.drafters] == names
    plan = make_plan(bare, earlier=EarlierAnswers(), deterministic=True)
    assert [one.largest.drafter for one in plan.drafters] == ["prompt-lookup"]


class Steady(Controller):
    """A controller that says what a call brings, and notes that it was finished."""

    finished = False

    def expected_fastest_call(self):
        return ExpectedCall(3.0, 1.5)

    def finish(self):
        self.finished = True


def test_a_plan_asks_the_controller_that_weighs_calls(model):
    plan = replace(make_plan(model), controller=Steady.deterministic([]))
    assert plan.expected_fastest_call == (3.0, 1.5)
    assert mentions(decision(plan), "2.00")
    replace(plan, learned=None).finish()
    assert not plan.controller.finished
    plan.finish()
    assert plan.controller.finished


def test_nothing_drafts_where_plain_decoding_is_asked_for():
    plan = make_plan(make_model(), decoding="plain")
    assert plan.controller == Never() and not plan.drafters and plan.scratch == 0
    assert mentions(decision(plan), "plain")


def test_what_is_loaded_drafts(model):
    heads = make_heads("medusa", model.backbone)
    for loaded, kind in ((DraftModel(make_base()), "draft-model"), (heads, "medusa")):
        plan = make_plan(model, drafter=loaded)
        assert plan.kind == kind and list(plan.loaded) == [loaded]
        assert isinstance(plan.controller, Controller)


def test_deterministic_answers_make_the_same_calls_whatever_was_learned(model):
    tokenizer = make_tokenizer()

    def calls(**settings):
        answer = ssmlx.stream_generate(model, tokenizer, [3, 1], max_tokens=60, **settings)
        return [segment.tokens for segment in answer]

    first = calls(deterministic=True)
    for _ in range(3):
        calls()
    assert calls(deterministic=True) == first


def test_an_answer_teaches_once_it_has_ended_or_was_given_up(model):
    plan = make_plan(model)
    before = plan.learned.costs.bank
    plan.finish()
    answer = ssmlx.stream_generate(model, make_tokenizer(), [3, 1], max_tokens=200)
    for _, _ in zip(range(30), answer, strict=False):
        pass
    answer.close()
    assert before == plan.learned.costs.bank or plan.learned.costs.to_dict()["plain"]
