"""Settings as type checkers and `help` see them."""

import inspect
import pydoc
from dataclasses import fields
from typing import get_type_hints

import pytest

import ssmlx
from ssmlx.settings import Settings

SNIPPET = """
import ssmlx
from ssmlx.generation.plan import make_plan

model, tokenizer = ssmlx.load()
make_plan(model, {})
for _ in ssmlx.stream_generate(model, tokenizer, "w1", {}): pass
ssmlx.generate(model, tokenizer, "w1", cache=model.make_cache(), {})
"""


def test_typed_settings_are_the_fields_of_the_configuration():
    config = ssmlx.GenerateConfig
    hints = get_type_hints(config)
    assert get_type_hints(Settings) == {one.name: hints[one.name] for one in fields(config)}
    assert Settings.__total__ is False


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "wrong"), [
    ("temp=3, tree=None, max_tokens=4", None),
    ("temperatur=3", 'Unexpected keyword argument "temperatur"'),
    ("temp='hot'", 'has incompatible type "str"; expected "float"'),
    ("drafter='oak'", "expected \"Literal['streams'"),
])  # fmt: skip
def test_a_type_check_finds_settings_that_are_none(tmp_path, settings, wrong):
    from mypy import api

    path = tmp_path / "app.py"
    path.write_text(SNIPPET.replace("{}", settings))
    options = ["--config-file", "pyproject.toml", "--cache-dir", str(tmp_path / "cache")]
    out, err, code = api.run([*options, str(path)])
    assert (code, err) == (0 if wrong is None else 1, ""), out
    errors = [line for line in out.splitlines() if ": error: " in line]
    assert len(errors) == (0 if wrong is None else SNIPPET.count("{}"))
    assert all(wrong in line for line in errors)


def test_help_shows_what_there_is():
    text = pydoc.render_doc(ssmlx, renderer=pydoc.plaintext)
    assert set(dir(ssmlx)) == set(ssmlx.__all__)
    for name in set(ssmlx.__all__) - {"__version__"}:
        value = getattr(ssmlx, name)
        told = inspect.getdoc(value)
        assert told and told.splitlines()[0] in text, name
        head = f"class {name}(" if inspect.isclass(value) else f"\n    {name}("
        assert head in text, name
    for said in ("ssmlx.settings.Settings", "ssmlx.load(", "temp: 'float' = 0.0"):
        assert said in text
