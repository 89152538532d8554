"""What is predicted from published row costs."""

import json
from dataclasses import replace
from statistics import median

import pytest
from real import exit_code, one_line

from perf import predict
from ssmlx.settings import StreamConfig, TreeConfig
from ssmlx.tuning.chips import CHIPS, costs
from ssmlx.tuning.cost import DraftShape

STREAMS = StreamConfig(
    num_streams=4, num_msa_layers=8, num_layers=32, hidden_size=64, draft_vocab_size=8192
)
SMALL, _, LLAMA = (predict.drafting(replace(one, bits=4), STREAMS) for one in predict.MODELS)
WEIGHTS = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256


def test_the_weights_are_those_of_the_models():
    def weights(decoder):
        return decoder.layers * decoder.layer_bytes() + decoder.head_bytes(decoder.vocab)

    assert weights(LLAMA) == WEIGHTS * 0.5625
    assert weights(replace(LLAMA, bits=16)) == WEIGHTS * 2
    assert weights(SMALL) == pytest.approx(134.5e6 * 0.5625, rel=0.001), "the head is the embedding"
    assert (SMALL.msa_layers, SMALL.draft_vocab) == (8, 8192), "a quarter of 30 layers"


def test_plain_decoding_waits_for_its_launches_and_the_bytes_of_its_weights():
    chip = CHIPS["M4 Max"]
    plain = costs(LLAMA, chip).plain_seconds(0)
    launches = (32 * 17 + 3) * chip.launch()
    assert plain == pytest.approx(launches + WEIGHTS * 0.5625 / (546e9 * chip.share))
    assert costs(LLAMA, chip).plain_seconds(4096) > plain
    one, dear = (costs(SMALL, chip).lower.at(rows) for rows in (1, 8))
    assert dear / one < 1.2 < costs(LLAMA, chip).lower.at(8) / costs(LLAMA, chip).lower.at(1)


def test_four_bits_want_small_trees_and_sixteen_larger_ones():
    ways = [
        (DraftShape(tree=TreeConfig(size=size), num_streams=4), tokens)
        for size, tokens in ((2, 1.6), (4, 2.2), (8, 2.7), (16, 3.2), (64, 3.3))
    ]
    found = {
        bits: predict.predict(replace(LLAMA, bits=bits), CHIPS["M4 Max"], ways, 100)
        for bits in (4, 16)
    }
    assert [found[bits]["shape"]["tree"]["size"] for bits in (4, 16)] == [4, 8]
    assert all(one["low"] <= one["middle"] <= one["high"] < 3 for one in found.values())
    old = predict.predict(LLAMA, CHIPS["M1 Max"], ways, 100)
    assert old["middle"] < 1 < found[4]["middle"], "a kernel a row"


def test_what_others_published_is_told_with_its_error():
    """The errors that perf/README tells of."""

    def error(rows, name, of):
        return median(abs(one[name] / one[of] - 1) for one in rows)

    assert error(predict.peers(), "middle", "speedup") < 0.12
    assert error(predict.peers(), "without", "speedup") < 0.17
    assert error(predict.rates(), "middle", "tokens_per_second") < 0.1


@pytest.fixture
def ask(tmp_path, capsys):
    """Run the command; gives (exit code, stdout, stderr)."""

    def ask(*args):
        return exit_code(predict.main, "--out", tmp_path / "out", *args), *capsys.readouterr()

    return ask


def test_the_command_labels_every_figure_as_a_prediction(ask, tmp_path):
    code, text, _ = ask()
    assert code == 0
    assert text.startswith("PREDICTION from published figures, not measured")
    assert text.count("an ASSUMPTION for this model") == 2, "of three models one is the adapter's"
    assert "dtree-mlx, tree, Qwen3-4B bf16" in text and "all: 114 figures, median error" in text
    result = json.loads((tmp_path / "out" / "predict.json").read_text())
    assert result["label"].startswith("PREDICTION")
    found = result["predictions"]
    assert len(found) == 3 * len(predict.ON)
    assert all(0 < one["low"] <= one["middle"] <= one["high"] < 3.5 for one in found)
    assert "llama-3.1-8b, 16-bit weights, not quantised" in ask("--bits", 16)[1]


def test_bad_input_is_one_line(ask, tmp_path):
    for args, message in (
        (("--adapter", "none"), "--adapter none has no streams"),
        (("--adapter", tmp_path), "streams_config.json"),
        (("--bits", "5"), "invalid choice: 5"),
    ):
        code, text, err = ask(*args)
        assert (code, text) == (2, "") and not (tmp_path / "out").exists()
        assert message in one_line(err, predict.PROG)
