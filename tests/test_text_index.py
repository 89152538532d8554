"""Where a text's last tokens stood before: against a search of the whole text."""

import random

import pytest

from ssmlx.drafters.text_index import (
    BOUNDARY,
    MAX_MATCH,
    MAX_MATCHES,
    NGRAM_LENGTHS,
    Match,
    TextIndex,
)


def agreement(tokens, end, text):
    """Tokens in which `text` ends as `tokens[:end]` does, none of them a boundary."""
    count = 0
    while (
        count < min(end, len(text), MAX_MATCH)
        and tokens[end - 1 - count] == text[-1 - count]
        and text[-1 - count] >= 0
    ):
        count += 1
    return count


def searched(tokens, text):
    """All matches, the longest first, then the newest."""
    own = text is tokens
    ends = range(1, len(tokens) + (0 if own else 1))
    found = [Match(end, agreement(tokens, end, text)) for end in ends]
    return sorted((one for one in found if one.length), key=lambda one: (-one.length, -one.end))


def random_text(rng, size, words=12):
    """Words from a small vocabulary, some of them in a row that was there before."""
    text = []
    while len(text) < size:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 12)]
        else:
            text.append(BOUNDARY if rng.random() < 0.03 else rng.randrange(words))
    return text[:size]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_match_is_the_longest_then_the_newest(seed):
    rng = random.Random(seed)
    index = TextIndex()
    for token in random_text(rng, 120):
        index.extend([token])
        expected = searched(index.tokens, index.tokens)
        found = next(index.find_matches(index.tokens), None)
        if not expected:
            assert found is None
            continue
        assert found is not None
        # Of the runs that make its length likely, only the newest places are looked at.
        run = max(length for length in NGRAM_LENGTHS if length <= expected[0].length)
        ends = sorted((one.end for one in expected if one.length >= run), reverse=True)
        among = [one for one in expected if one.end in ends[:MAX_MATCHES]]
        assert found == among[0]


@pytest.mark.parametrize("seed", range(4))
def test_another_text_is_looked_up_as_it_would_be_behind_a_boundary(seed):
    rng = random.Random(seed)
    tokens = random_text(rng, 60)
    text = random_text(rng, 30)
    apart = TextIndex(tokens)
    together = TextIndex([*tokens, BOUNDARY, *text])
    found = list(apart.find_matches(text))
    same = [one for one in together.find_matches(together.tokens) if one.end <= len(tokens)]
    assert found[:1] == same[:1] or len(same) == 0


def test_nothing_follows_beyond_a_text():
    index = TextIndex([1, 2, 3, BOUNDARY, 1, 2])
    match = next(index.find_matches([5, 2]))
    assert match == Match(6, 1)
    assert index.tokens_after(match, 5) == []
    assert index.tokens_after(Match(2, 2), 5) == [3]


def test_a_match_is_no_longer_than_asked_and_bounded():
    text = [7] * (3 * MAX_MATCH)
    index = TextIndex(text)
    assert next(index.find_matches(text)).length == MAX_MATCH
    assert next(index.find_matches(text, 2)).length == 2
    assert list(TextIndex([1, 2]).find_matches([])) == []


def test_what_is_forgotten_is_found_no_more():
    index = TextIndex([1, 2, 3, BOUNDARY, 4, 5, 6])
    index.keep_last(3)
    assert index.tokens == [4, 5, 6]
    assert next(index.find_matches([2]), None) is None
    assert next(index.find_matches([5])) == Match(2, 1)
    assert index.nbytes < TextIndex([1] * 7).nbytes
