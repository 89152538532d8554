"""Chips, rooflines and what is predicted from them."""

import json
from dataclasses import asdict, replace

import pytest
from real import one_line

from perf import predict
from perf.predict import CHIPS, costs
from ssmlx.settings import PruneConfig, TreeConfig
from ssmlx.tuning.cost import DraftShape

BY_NAME = {chip.name: chip for chip in CHIPS}


def test_kernels_change_at_the_rows_of_the_design_notes():
    m4, m1 = BY_NAME["M4"], BY_NAME["M1"]
    limits = {"M1": (14, 10, 6), "M4 Pro": (13, 15, 13), "M5 Max": (33, 25, 13),
              "M3 Ultra": (32, 18, 12)}  # fmt: skip
    for name, rows in limits.items():
        sizes = ((2048, 2048), (4096, 2048), (4096, 14336))
        assert tuple(BY_NAME[name].matrix_rows(*size) for size in sizes) == rows
    passes = [m4.weight_passes(rows, 1024, 1024) for rows in (1, 5, 6, 10, 11, 12, 13, 32, 33)]
    assert passes == [1, 1, 2, 2, 3, 3, 1, 1, 2], "once more at 6 and 11 rows"
    assert [m1.weight_passes(rows, 1024, 1024) for rows in (1, 5, 13, 14)] == [1, 5, 13, 1]


STREAMS = {"num_streams": 4, "num_msa_layers": 8, "num_layers": 32, "draft_vocab_size": 8192}
WEIGHTS = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256
SMALL, _, LLAMA = (replace(one, bits=4).drafting(STREAMS) for one in predict.MODELS)


def test_the_weights_are_those_of_the_models():
    def weights(decoder):
        layers = decoder.layers * sum(inner * outer for inner, outer in decoder.layer)
        return layers + decoder.hidden * decoder.vocab

    assert weights(LLAMA) == WEIGHTS
    assert weights(LLAMA) + 128256 * 4096 == pytest.approx(8.03e9, rel=0.001)
    assert weights(SMALL) == pytest.approx(134.5e6, rel=0.001), "the head is the embedding"
    assert (SMALL.msa_layers, SMALL.draft_vocab) == (8, 8192), "a quarter of 30 layers"
    assert LLAMA.weight_bytes == 0.5625
    assert replace(LLAMA, bits=16).weight_bytes == 2


def test_plain_decoding_waits_for_the_bytes_of_the_weights_and_a_few_rows_are_free():
    chip = BY_NAME["M4 Max"]
    least, expected = costs(LLAMA, chip, "once"), WEIGHTS * 0.5625 / 546e9
    assert least.plain_seconds(0) == pytest.approx(expected)
    assert least.plain_seconds(4096) > expected
    assert costs(LLAMA, chip, "repeated").plain_seconds(0) == pytest.approx(expected)
    assert least.lower.at(4) + least.upper.at(4) + least.head.at(4) == pytest.approx(expected)
    assert least.lower.at(4) == pytest.approx(3 * least.upper.at(4)), "24 layers and 8"
    assert least.lower.at(64) > 1.5 * least.lower.at(4), "bound by arithmetic by then"


def test_prediction_takes_the_tree_that_the_kernels_like():
    """On M4 a sixth row reads the weights again; with weights read once, ten cost no more."""
    ways = [
        (DraftShape(tree=TreeConfig(size=size), num_streams=4), tokens)
        for size, tokens in ((2, 1.6), (5, 2.4), (6, 2.5), (10, 2.9), (64, 3.2))
    ]
    found = predict.predict(LLAMA, BY_NAME["M4 Max"], ways, 100)
    assert [found[one]["tree"]["size"] for one in ("low_shape", "high_shape")] == [5, 10]
    assert 1 < found["low"] < found["high"] < 2.9
    assert found["plain"] == pytest.approx(546e9 / (WEIGHTS * 0.5625), rel=0.01)


@pytest.fixture
def calibration(tmp_path):
    """A result of ssmlx.calibrate, as far as it is read."""
    small, large = (DraftShape(tree=TreeConfig(size=size), num_streams=5) for size in (4, 16))
    pruned = replace(large, prune=PruneConfig(kind="budget", keep=3))
    candidates = [
        {"shape": asdict(shape), "tokens_per_call": tokens}
        for shape, tokens in ((small, 2.5), (large, 3.5), (pruned, 3.0))
    ]
    streams = {"num_streams": 5, "num_msa_layers": 8, "num_layers": 30, "draft_vocab_size": 8192}
    path = tmp_path / "calibrate-sql.json"
    values = {"model": "smollm2-135m", "adapter": "sql", "context": 100, "streams": streams}
    path.write_text(json.dumps({**values, "candidates": candidates}))
    return path


@pytest.fixture
def ask(calibration, tmp_path, capsys):
    """Run the command; gives (exit code, stdout, stderr)."""

    def ask(*args):
        argv = ["--calibration", calibration, "--out", tmp_path / "out", *args]
        try:
            code = predict.main([*map(str, argv)])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return ask


def test_the_command_labels_every_figure_as_a_prediction(ask, tmp_path):
    code, text, _ = ask()
    assert code == 0
    assert text.startswith("PREDICTION from published figures, not measured")
    assert text.count("an ASSUMPTION for this model") == 2, "of three models one was calibrated"
    assert "M1 Pro (clock of M1 Ultra)" in text
    result = json.loads((tmp_path / "out" / "predict.json").read_text())
    assert result["label"].startswith("PREDICTION")
    assert len(result["predictions"]) == 3 * len(CHIPS)
    assert all(0 < one["low"] <= one["high"] < 3.5 for one in result["predictions"])
    assert (tmp_path / "out" / "predict.png").stat().st_size > 10_000
    assert "llama-3.1-8b, 16-bit weights, not quantised" in ask("--bits", 16)[1]


def test_bad_input_is_one_line(ask, tmp_path):
    half = tmp_path / "half.json"
    half.write_text(json.dumps({"candidates": []}))
    for args, message in (
        (("--calibration", "nowhere.json"), "no calibration nowhere"),
        (("--calibration", half), "half.json is incomplete ("),
        (("--bits", "5"), "invalid choice: 5"),
    ):
        code, text, err = ask(*args)
        assert (code, text) == (2, "") and not (tmp_path / "out").exists()
        assert message in one_line(err, predict.PROG)
