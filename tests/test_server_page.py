"""The chat page in Chromium: what it sends, shows and remembers, and what it never lets run."""

import json
import re
import shutil
from threading import Thread

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
uvicorn = pytest.importorskip("uvicorn")

import ssmlx
from ssmlx.server.app import LOCAL, make_app
from ssmlx.server.handler import RequestHandler

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `apt-get install chromium`"),
]
OTHER = "ssmlx.test"  # a name for this machine that is not known to be its own
QUIET = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""
FOCUS = "document.activeElement"
NAME = "document.activeElement.ariaLabel"
CHAT = "**/completions"
SAID = ".answer:last-child > .words"
FIGURES = ".answer:last-child .foot p"
HOSTILE = """<img src=x onerror="document.title='owned'"> **<b onclick=alert(1)>bold</b>** & &lt;

```"><script>document.title='owned'</script>
</code></pre><iframe src="javascript:alert(1)"></iframe>
```
`</code><svg onload=alert(1)>` [here](javascript:alert(1)) <style>* { display: none }</style>"""


@pytest.fixture(scope="module")
def address(base, adapter):
    engine = ssmlx.Engine(str(base), dtype="float32")
    handler = RequestHandler(engine, {"tiny": None, "tiny:own": str(adapter)})
    app = make_app(handler, hosts=(*LOCAL, OTHER))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture
def page(address, request):
    """The page; whatever it did, it asked its own server alone, and broke no rule of its policy."""
    address = address.replace("127.0.0.1", getattr(request, "param", "127.0.0.1"))
    with sync_api.sync_playwright() as playwright:
        options = [*QUIET.split(), f"--host-resolver-rules=MAP {OTHER} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page(color_scheme="dark")
        asked = []
        wrong = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "olicy" in said.text else None)
        page.on("dialog", lambda dialog: dialog.accept())
        policy = page.goto(address).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        page.wait_for_selector("#model option >> nth=1", state="attached")
        yield page
        assert [url for url in asked if not url.startswith(address)] == [] == wrong
        assert page.title() == "ssmlx"
        browser.close()


def ask(page, text):
    """The body of the request that is sent once this is typed."""
    page.keyboard.type(text)
    with page.expect_request(CHAT) as sent:
        page.keyboard.press("Enter")
    page.wait_for_selector("#send.Send")
    return sent.value.post_data_json


def script(page, *deltas, status=200):
    """The server says this from now on, n tokens in the n-th call; or refuses."""
    ends = [{"delta": delta, "finish_reason": "stop"} for delta in deltas]
    told = [{"choices": [one], "ssmlx": {"tokens": n}} for n, one in enumerate(ends, 1)]
    body = "".join(f"data: {one}\n\n" for one in [*map(json.dumps, told), "[DONE]"])
    if status != 200:
        body = json.dumps({"error": {"message": deltas[0]}})
    page.route(CHAT, lambda route: route.fulfill(status=status, body=body))


def test_it_sends_streams_stops_and_remembers(page):
    page.select_option("#model", "tiny:own")
    page.focus("#prompt")
    page.evaluate("change({ max_tokens: 30 })")
    body = ask(page, "w1 w2")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny:own", 0, 30)
    figures = r"[\d.]+ tokens per call · [\d.]+ tokens/s · \d+ calls · "
    assert re.match(figures + "tiny:own", page.inner_text(FIGURES))
    with page.expect_request(CHAT) as again:
        page.click("text=Again")
    page.wait_for_selector("#send.Send")
    assert again.value.post_data_json == body and page.locator("#log li").count() == 2
    page.evaluate("change({ max_tokens: 16000 })")
    page.keyboard.type("w3\n")
    page.wait_for_selector(f"{SAID} span >> nth=5")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send.Send")
    assert page.inner_text(FIGURES).endswith("tiny:own · stopped")
    shown = page.inner_text("#log")
    page.reload()
    page.select_option("#chats", index=1)
    assert page.inner_text("#log") == shown
    page.click("#drop")
    page.reload()
    assert page.locator("#chats option, #log li").count() == 1


@pytest.mark.parametrize("page", ["localhost", OTHER], indirect=True)
def test_an_answer_can_be_copied_also_where_the_browser_trusts_no_page(page):
    text = "one\n\n```\ntwo\n```"
    script(page, {"content": text})
    ask(page, "w1")
    assert page.evaluate("isSecureContext") == ("localhost" in page.url)
    page.click("text=Copy")
    page.wait_for_selector("text=Copied")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == text


def test_what_a_model_says_is_text(page):
    pieces = [{"content": piece} for piece in HOSTILE]
    script(page, {"reasoning_content": HOSTILE}, *pieces)
    ask(page, HOSTILE.split("\n")[0])
    assert page.locator("summary").all_inner_texts() == ["Reasoning"]
    assert page.evaluate(f"document.querySelector('{SAID}').textContent") == HOSTILE
    found = page.evaluate("[...document.querySelectorAll('#log *')].map((node) => node.localName)")
    ours = "ol li div p span strong code pre button details summary b"
    assert {"strong", "pre"} <= set(found) <= set(ours.split())
    script(page, "<b>no</b>", status=400)
    ask(page, "w1")
    assert (page.inner_text("#notice"), page.inner_text(FIGURES)) == ("<b>no</b>", "interrupted")
    script(page, "no key", status=401)
    ask(page, "w2")
    page.keyboard.type("secret\n")
    page.keyboard.press("Escape")
    page.focus("#prompt")
    with page.expect_request(CHAT) as sent:
        page.keyboard.type("w3\n")
    assert sent.value.headers["authorization"] == "Bearer secret"
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_the_keyboard_is_enough_on_a_phone(page):
    page.set_viewport_size({"width": 360, "height": 640})
    script(page, {"content": "```\n" + 300 * "x"}, *5 * [{"content": 90 * "y"}], {"content": "z"})
    ask(page, "w1")
    ask(page, "w2")
    page.keyboard.press("ArrowUp")
    turns = ask(page, " w3")["messages"]
    assert [turn["content"] for turn in turns][::2] == ["w1", "w2 w3"]
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#chats option").count() == 3, "what was edited is still there"
    seen = {}
    while "Show calls" not in seen and len(seen) < 9:
        page.keyboard.press("Tab")
        seen |= {page.evaluate(NAME): page.evaluate(f"getComputedStyle({FOCUS}).outlineStyle")}
    assert {seen[name] for name in ("Send", "Conversations", "Show calls")} == {"solid"}
    spans = page.locator(f"{SAID} span")
    names = ["n1", "n2 odd", "n3", "n4 odd", "n5", "n5 odd", "n5"]
    assert [span.get_attribute("class") for span in spans.all()] == names
    tints = "(all) => new Set(all.map((one) => getComputedStyle(one).backgroundColor)).size"
    assert (spans.evaluate_all(tints), page.is_visible("#legend")) == (1, False)
    page.keyboard.press("Enter")
    assert (spans.evaluate_all(tints), page.is_visible("#legend")) == (6, True)
