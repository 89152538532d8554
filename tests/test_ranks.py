"""A model split over processes on this machine, which talk over MLX's ring: the tokens of one."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import ssmlx  # noqa: F401  (first: it prefers OpenBLAS)

import mlx.core as mx  # isort: skip
import tiny
from real import questions, write_data

from ssmlx.api import token_steps
from ssmlx.commands import train
from ssmlx.loading.attach import fuse_streams
from ssmlx.model.backbone import Backbone
from ssmlx.model.ranks import Group, shard
from ssmlx.settings import PruneConfig
from ssmlx.training.record import LOG_FILE, read_record

ROOT = Path(__file__).parents[1]
PROMPT, LENGTH = [1, 5, 2, 7], 12
SIZES = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}

CASES = {
    ("all", True): ["plain", "streams", "lookahead"],
    ("all", False): ["streams"],
    ("streams", False): ["fused", "sampled", "budget", "threshold", "prompt-lookup"],
}
SETTINGS = {
    "plain": {"decoding": "plain"},
    "streams": {},
    "fused": {"stream_schedule": "fused"},
    "sampled": {"temp": 1.0, "seed": 3},
    "budget": {"prune": PruneConfig(kind="budget", keep=4)},
    "threshold": {"prune": PruneConfig(kind="threshold", threshold=0.1), "temp": 1.0, "seed": 4},
    "prompt-lookup": {"drafter": "prompt-lookup"},
    "lookahead": {"drafter": "lookahead"},
}


def launch(count: int, *command: str, folder: Path, **options) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of `python ARGS` on each of `count` ranks."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    own = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **own, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        found = [process.communicate(timeout=300, **options) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(processes, found, strict=True)]


def on_ranks(count: int, case: str, folder: Path) -> list:
    """What the function `case` of this file returns on each rank."""
    code = f"import test_ranks as t, json; print(json.dumps(t.{case}(t.group())))"
    results = launch(count, "-c", code, folder=folder)
    assert [code for code, _, _ in results] == [0] * count, results
    return [json.loads(out) for _, out, _ in results]


def group() -> Group:
    mx.set_default_device(mx.cpu)
    return mx.distributed.init(strict=True, backend="ring")


def make_backbone(ranks: Group | None, packed: bool = False) -> Backbone:
    model = tiny.make_packed_base(**SIZES) if packed else tiny.make_base(**SIZES)
    if ranks is not None:
        shard(model, ranks)
    return Backbone(model, group=ranks)


def tokens_of(model, **settings) -> list[int]:
    steps = token_steps(model, PROMPT, model.make_cache(), max_tokens=LENGTH, **settings)
    return tiny.first_tokens(steps, LENGTH)[0]


def answers(ranks: Group | None) -> dict[str, list[int]]:
    """The tokens of every kind of answer."""
    found, whole = {}, make_backbone(None)
    for (scope, merge), names in CASES.items():
        adapter = tiny.make_adapter(whole, scope, **tiny.RESIDUAL)
        model = fuse_streams(make_backbone(ranks), adapter, merge_lora=merge)
        for name in names:
            found[f"{scope} {merge} {name}"] = tokens_of(model, **SETTINGS[name])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gives_the_tokens_of_one_process(count, tmp_path):
    expected = answers(None)
    for found in on_ranks(count, "answers", tmp_path):
        assert found == expected


def run_ranks(count: int, folder: Path, *command: object) -> list[tuple[int, str, str]]:
    """A command on each rank, by MLX's backend over the loopback."""
    return launch(count, "-m", *map(str, command), folder=folder)


SMALL = ("--num-streams", 2, "--num-msa-layers", 2, "--lora-rank", 4, "--prune-rank", 4,
         "--batch-size", 5, "--epochs", 1, "--max-length", 24, "--dtype", "float32")  # fmt: skip


@pytest.mark.slow
def test_ranks_train_to_what_one_process_does(base, tmp_path):
    data = write_data(tmp_path / "data", questions(range(11)))  # the last batch has one example
    arguments = ["ssmlx.train", "--model", base, "--data", data, *SMALL, "--out"]
    assert train.main([str(one) for one in [*arguments[1:], tmp_path / "alone"]]) == 0
    for more in (("--max-steps", 1), ()):  # stopped, and gone on with
        results = run_ranks(2, tmp_path, *arguments, tmp_path / "both", *more)
        assert [code for code, _, _ in results] == [0, 0], results
        assert "step" in results[0][2] and results[1][1:] == ("", "")
    alone, both = (
        mx.load(str(tmp_path / name / "state.safetensors")) for name in ("alone", "both")
    )
    assert alone.keys() == both.keys()
    for name, array in alone.items():
        tiny.assert_close(both[name], array, 1e-4)
    logs = [read_record(tmp_path / name / LOG_FILE) for name in ("alone", "both")]
    assert [one["step"] for one in logs[0]] == [one["step"] for one in logs[1]] == [1, 2, 3]
    for one, other in zip(*logs, strict=True):
        for key in one.keys() - {"time"}:
            assert other[key] == pytest.approx(one[key], abs=1e-4)
