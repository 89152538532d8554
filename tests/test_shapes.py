"""Shapes of streams, priced by what calls cost."""

import json
from dataclasses import replace

import pytest
from refusals import exits, mentions

from perf import shapes
from ssmlx.settings import StreamConfig

BASE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 61, "num_hidden_layers": 5}  # fmt: skip
CONFIG = StreamConfig(num_streams=3, num_msa_layers=2, num_layers=5, hidden_size=32)


def test_a_drafting_pass_reads_its_layers_and_its_head():
    config = replace(CONFIG, draft_vocab_size=20)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    read = config.num_msa_layers * layer + 20 * 32
    whole = config.num_layers * layer + 61 * 32
    assert shapes.drafting_share(config, BASE) == pytest.approx(read / whole)


def test_fewer_layers_are_worth_what_they_spare(tmp_path, monkeypatch, capsys):
    config = replace(CONFIG, base_model="b", tokens_per_call={2: 1.5, 4: 2.0, 16: 2.6})
    (tmp_path / "streams_config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setattr(shapes, "resolve_model", lambda name: name)
    monkeypatch.setattr(shapes, "read_base_settings", lambda path: BASE)
    argv = [str(tmp_path), "--rows", "flat=1:1,4:1", "--like", "1:10:0.5"]
    assert shapes.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].split("|")[-2].strip() == "flat"
    for line, tokens, one in (
        (lines[2], 2.0, config),
        (lines[3], 1.5, replace(config, num_msa_layers=1, draft_vocab_size=10)),
    ):
        speed = tokens / (1 + shapes.drafting_share(one, BASE))
        assert line.split("|")[-2].strip() == f"{speed:.2f} (4 nodes)"  # 16 rows were not timed
    assert mentions(exits(capsys, shapes.main, *argv, "--like", "2x"), "--like 2x")
