"""Drafts of what a text says again, where a controller decides: the same tokens, and no waiting."""

import pytest
from controlled import PROMPT, answer
from device_log import IDLE, watched
from loops import plain_tokens
from tiny import VOCAB, make_base, make_model

from ssmlx.decoding.draft_shape import DraftShape
from ssmlx.decoding.sampling import Sampling
from ssmlx.drafters.lookup import EARLIER_ANSWERS, EXPECTED, NAME, PromptLookupDrafter
from ssmlx.drafters.text_index import CONTEXT_TOKENS, EARLIER_TOKENS, EarlierAnswers, TextIndex
from ssmlx.model.backbone import Backbone
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import GenerateConfig, PromptLookupConfig

SAMPLINGS = ({}, {"temp": 1.0, "seed": 3}, {"temp": 0.7, "seed": 1, "repetition_penalty": 1.2})


@pytest.fixture(scope="module")
def bare():
    return StreamFusedModel(Backbone(make_base()))


@pytest.mark.parametrize("settings", SAMPLINGS, ids=str)
@pytest.mark.parametrize("has_streams", [False, True])
def test_the_tokens_are_plain_decodings(bare, has_streams, settings):
    model = make_model() if has_streams else bare
    expected = plain_tokens(model, PROMPT, 80, Sampling(GenerateConfig(**settings), VOCAB))
    tokens, lengths, drafts = answer(model, 80, **settings)
    assert tokens == expected
    assert sum(one.accepted for one in drafts.values()) == sum(lengths) - len(lengths)
    if not settings:  # a greedy text of random weights repeats itself
        assert drafts[NAME].accepted > 10
    assert answer(model, 80, row_cost=0.5, **settings)[0] == expected


def test_an_answer_that_was_given_before_is_copied(bare):
    """By the next answer of the session, and in few calls: its beginning is known, too."""
    earlier = EarlierAnswers()
    prompt = [9, 9, 2, 7, 5, 3, 1]
    expected, lengths, drafts = answer(bare, 40, prompt=prompt, temp=1.0, seed=5, earlier=earlier)
    earlier.add(prompt, expected)
    again, fewer, drafts = answer(bare, 40, prompt=prompt, temp=1.0, seed=5, earlier=earlier)
    assert again == expected
    assert drafts[EARLIER_ANSWERS].accepted > 25 and len(fewer) < len(lengths) / 2
    # Nobody else's answers are looked up in.
    _, _, others = answer(bare, 40, prompt=prompt, temp=1.0, seed=5, earlier=EarlierAnswers())
    assert EARLIER_ANSWERS not in others


def test_an_expected_text_is_drafted_from_its_beginning(bare):
    expected, _, _ = answer(bare, 30, temp=1.0, seed=8)
    lookup = PromptLookupConfig(reference=tuple(expected))
    tokens, lengths, drafts = answer(bare, 30, temp=1.0, seed=8, prompt_lookup=lookup)
    assert tokens == expected
    assert drafts[EXPECTED].accepted > 15 and len(lengths) < 12


def test_where_nothing_pays_no_plain_call_waits(bare):
    """Each is launched before the one before it is read, as in plain decoding."""
    idle = []
    for cost in (3.0, 3.0, 0.01):  # once more: constants are computed the first time
        with watched(bare) as device:
            _, lengths, drafts = answer(bare, 60, row_cost=cost)
        idle.append(device.events.count(IDLE))
        assert (lengths == [1] * 60) == (not drafts) == (cost > 1)
    assert idle[1] == 1 < idle[2]  # after the prompt's piece


def test_a_draft_ends_with_an_end_token():
    drafter = PromptLookupDrafter(PromptLookupConfig(num_draft_tokens=5, size=6), end_tokens=[7])
    drafter.start([1, 2, 3, 7, 4, 5, 6, 1, 2])
    offer = drafter.offer()
    assert offer is not None and offer.following == 2
    drafter.follow([3], 9)
    assert drafter.offer().following == 1
    drafter.follow([7], 10)
    assert drafter.offer().following == 5


def test_asking_for_an_offer_changes_nothing_and_it_follows_the_text():
    drafter = PromptLookupDrafter(PromptLookupConfig())
    assert drafter.offer() is None
    drafter.start([1, 2, 3])
    assert drafter.offer() is None
    drafter.follow([1], 3)
    first = drafter.offer()
    assert first == drafter.offer() and first.match_length == 1
    drafter.follow([2], 4)
    assert drafter.offer().match_length == 2


def test_a_chain_is_looked_up_once_for_its_offer_and_its_draft(monkeypatch):
    drafter = PromptLookupDrafter(PromptLookupConfig(num_draft_tokens=4), is_chain=True)
    looked_up = []
    real = TextIndex.find_matches

    def noted(self, *given):
        looked_up.append(given)
        return real(self, *given)

    monkeypatch.setattr(TextIndex, "find_matches", noted)
    drafter.start([1, 2, 3, 4, 5, 1, 2])
    assert drafter.offer().following == 4
    for levels in (4, 2):
        tree = drafter.propose(None, DraftShape("prompt-lookup", 1 + levels, levels))
        assert tree.tokens.tolist() == [2, 3, 4, 5, 1][: 1 + levels]
    assert len(looked_up) == 1
    drafter.follow([3], 7)
    assert drafter.propose(None, drafter.largest).tokens.tolist() == [3, 4, 5, 1, 2]
    assert len(looked_up) == 2


def test_an_index_is_begun_once_though_a_drafter_is_started_again(bare):
    """As an answer that leaves a batch starts its drafters again."""
    drafter = PromptLookupDrafter(PromptLookupConfig())
    drafter.start([1, 2, 3, 1])
    index = drafter.source.index
    drafter.start([1, 2, 3, 1, 2, 9])
    assert drafter.source.index is index and index.tokens == [1, 2, 3, 1, 2, 9]
    drafter.start([4, 4])
    assert drafter.source.index.tokens == [4, 4] and drafter.offer().match_length == 1


def test_earlier_answers_are_bounded():
    earlier = EarlierAnswers()
    for number in range(3 * EARLIER_TOKENS // 100):
        earlier.add([5] * 20, [number % VOCAB] * 100)
    assert EARLIER_TOKENS // 2 <= len(earlier.index.tokens) <= EARLIER_TOKENS + 100 + CONTEXT_TOKENS
    assert earlier.nbytes < 2**24
