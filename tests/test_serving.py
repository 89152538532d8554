"""perf.serving: what becomes of short answers and of refusals."""

from io import BytesIO
from urllib.error import HTTPError

import pytest

from perf import serving
from ssmlx.errors import InputError


@pytest.mark.parametrize("chunks", [3, serving.BEFORE, serving.BEFORE + 1])
def test_an_answer_that_ends_too_soon_tells_no_delay(chunks):
    def ask(prompt, max_tokens, tell=lambda count: None):
        heard = serving.Heard(asked=0.0)
        for count in range(1, min(chunks, max_tokens) + 1):
            heard.times.append(float(count))
            tell(count)
        return heard

    rows = serving.delay_of("ssmlx", ask, "hello", 4000)
    assert [row["longest"] for row in rows] == [1.0] * (chunks > serving.BEFORE)


def test_a_refusal_is_told_as_one(monkeypatch):
    def refuse(request, timeout):
        raise HTTPError(request.full_url, 400, "Bad Request", {}, BytesIO())

    monkeypatch.setattr(serving, "urlopen", refuse)
    with pytest.raises(InputError, match=r"gave no answer .*400.*; expected one; lower --long"):
        serving.ask_server("http://127.0.0.1:1", "m", "hello", 1)
