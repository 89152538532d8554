"""A model split over processes on this machine, which talk over MLX's ring: the tokens of one."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import ssmlx  # noqa: F401  (first: it prefers OpenBLAS)

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import tiny
from mlx.nn.layers.distributed import shard_linear
from real import questions, run_module, write_data
from refusals import mentions, refusal

from ssmlx.commands import train
from ssmlx.decoding.call import decide_and_accept
from ssmlx.decoding.sampling import Sampling, row_positions
from ssmlx.loading.attach import attach_adapter, swap_adapter
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import LoraWeights, RowScope, SummedLora, attach_lora, linear_sizes
from ssmlx.model.ranks import Group, partial_product, shard_over_ranks
from ssmlx.settings import ACCEPTANCES, AcceptanceConfig, GenerateConfig, PruneConfig
from ssmlx.training.record import LOG_FILE, read_log_entries

ROOT = Path(__file__).parents[1]
PROMPT = [1, 5, 2, 7]
LENGTH = 12
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
SIZES = {
    "whole": {**HEADS, "hidden_size": 48},
    # of every matrix, 2 and 3 parts can be packed by 32
    "packed": {**HEADS, "hidden_size": 192, "head_dim": 32, "intermediate_size": 192},
}

# Of the adapter's scope, how its LoRA is attached, and the base: what is answered.
CASES = {
    ("all", "merged", "whole"): ["plain", "streams", "lookahead"],
    ("all", "apart", "whole"): ["streams"],
    ("streams", "apart", "whole"): [
        "fused", "sampled", "budget", "threshold", "typical", "prompt-lookup",
    ],
    ("streams", "apart", "packed"): ["streams"],
}  # fmt: skip
SETTINGS = {
    "plain": {"decoding": "plain"},
    "streams": {},
    "fused": {"stream_schedule": "fused"},
    "sampled": {"temp": 1.0, "seed": 3},
    "budget": {"prune": PruneConfig(kind="budget", keep=4)},
    "threshold": {"prune": PruneConfig(kind="threshold", threshold=0.1), "temp": 1.0, "seed": 4},
    "typical": {"acceptance": AcceptanceConfig(kind="typical"), "temp": 1.0, "seed": 5},
    "prompt-lookup": {"drafter": "prompt-lookup"},
    "lookahead": {"drafter": "lookahead"},
}


@dataclass(frozen=True)
class FakeGroup:
    """A rank of a group in whose place nobody answers."""

    own: int
    count: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.count


def test_models_that_cannot_be_split_are_refused_in_one_line():
    two = FakeGroup(0, 2)
    three = FakeGroup(0, 3)
    assert mentions(refusal(shard_over_ranks, tiny.make_base("phi3"), two), "'phi3'")
    line = refusal(shard_over_ranks, tiny.make_base(), three)
    assert mentions(line, "num_attention_heads", "4")
    few = tiny.make_base(num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    assert mentions(refusal(shard_over_ranks, few, three), "num_key_value_heads", "2")
    odd = tiny.make_base(num_attention_heads=6, num_key_value_heads=6, intermediate_size=50)
    assert mentions(refusal(shard_over_ranks, odd, three), "3")


@pytest.mark.parametrize("kind", ACCEPTANCES)
def test_every_rank_accepts_what_rank_0_does(kind, monkeypatch):
    """Though each has rounded the logits in its own way."""
    tree = tiny.tree_from_parents([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    sampler = Sampling(GenerateConfig(temp=1.0, seed=1), tiny.VOCAB)
    positions = row_positions(tree, mx.array([7]), mx.zeros(0, mx.int32))
    model = tiny.make_model()
    sums = []

    def answered(seed, rank):
        model.backbone.group = FakeGroup(rank, 2)
        numbers = iter(range(9))

        def all_sum(flat, group):
            if group.rank() == 0:
                sums.append(flat)
                return flat
            return sums[next(numbers)] + flat

        monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
        logits = mx.random.normal((5, tiny.VOCAB), key=mx.random.key(seed))
        config = AcceptanceConfig(kind=kind, epsilon=0.01)
        tokens, accepted = decide_and_accept(model, tree, logits, sampler, positions, config)
        found = (tokens, accepted.path, accepted.new_tokens, accepted.num_accepted)
        return [one.tolist() for one in found]

    own = answered(seed=1, rank=0)
    del sums[:]
    assert answered(seed=0, rank=0) != own
    assert answered(seed=1, rank=1) == answered(seed=0, rank=0)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("how", ["all-to-sharded", "sharded-to-all"])
@pytest.mark.parametrize("merge", [True, False])
def test_the_parts_of_a_layer_with_lora_are_the_whole_one(is_packed, how, merge):
    mx.random.seed(0)
    linear = nn.Linear(128, 6, bias=False)
    whole = nn.QuantizedLinear.from_linear(linear, 32, 4) if is_packed else linear
    x = mx.random.normal((1, 5, 128))
    weights = LoraWeights(mx.random.normal((128, 2)), mx.random.normal((2, 6)), 0.5)

    def attached(layer: nn.Module) -> nn.Module:
        model = nn.Sequential(layer)
        given = {"layers.0": weights}
        attach_lora(model, given, RowScope(0), merge=merge, dtype=mx.float32)
        return model.layers[0]

    layers = [shard_linear(whole, how, group=FakeGroup(rank, 2)) for rank in range(2)]
    assert all(linear_sizes(layer) == (6, 128) for layer in layers)
    if how == "all-to-sharded":
        found = mx.concatenate([attached(layer)(x) for layer in layers], axis=-1)
    else:
        parts = zip((attached(layer) for layer in layers), mx.split(x, 2, axis=-1), strict=True)
        found = sum(
            one.product_with_lora(x) if isinstance(one, SummedLora) else partial_product(one, x)
            for one, x in parts
        )
    tiny.assert_close(found, attached(whole)(x), 1e-5)


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
            [sys.executable, *command],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **own, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
        )
        for rank in range(count)
    ]
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


def make_backbone(ranks: Group | None, kind: str = "whole") -> Backbone:
    make = tiny.make_packed_base if kind == "packed" else tiny.make_base
    model = make(**SIZES[kind])
    if ranks is not None:
        shard_over_ranks(model, ranks)
    return Backbone(model, group=ranks)


def tokens_of(model, **settings) -> list[int]:
    steps = tiny.token_steps(model, PROMPT, model.make_cache(), max_tokens=LENGTH, **settings)
    return tiny.first_tokens(steps, LENGTH)[0]


def answers(ranks: Group | None) -> dict[str, list[int]]:
    """The tokens of every kind of answer."""
    found = {}
    for (scope, how, kind), names in CASES.items():
        adapter = tiny.make_adapter(make_backbone(None, kind), scope, **tiny.RESIDUAL)
        model = attach_adapter(make_backbone(ranks, kind), adapter, merge_lora=how == "merged")
        for name in names:
            found[f"{scope} {how} {kind} {name}"] = tokens_of(model, **SETTINGS[name])
    unadapted = swap_adapter(model, None)  # its layers as they were
    found["swapped"] = tokens_of(unadapted)
    return found


def drawn(ranks: Group | None) -> list[int]:
    """The tokens of an answer that samples without a seed."""
    mx.random.seed(ranks.rank())
    model = attach_adapter(
        make_backbone(ranks), tiny.make_adapter(make_backbone(None)), merge_lora=True
    )
    return tokens_of(model, temp=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gives_the_tokens_of_one_process(count, tmp_path):
    expected = answers(None)
    for found in on_ranks(count, "answers", tmp_path):
        assert found == expected


@pytest.mark.slow
def test_rank_0_decides_where_others_would_not_agree(tmp_path):
    first, second = on_ranks(2, "drawn", tmp_path)
    assert first == second and len(set(first)) > 1


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
    logs = [read_log_entries(tmp_path / name / LOG_FILE) for name in ("alone", "both")]
    assert [one["step"] for one in logs[0]] == [one["step"] for one in logs[1]] == [1, 2, 3]
    for one, other in zip(*logs, strict=True):
        for key in one.keys() - {"time"}:
            assert other[key] == pytest.approx(one[key], abs=1e-4)


@pytest.mark.slow
def test_one_process_shows_the_answer_of_all(base, tmp_path):
    asked = ["ssmlx.generate", "--model", base, "--adapter", "none", "--prompt", "w1", "--template",
             "{prompt}", "--max-tokens"]  # fmt: skip
    alone = run_module(*map(str, asked), "9")
    (_, shown, _), other = run_ranks(2, tmp_path, *asked, 9)
    assert shown == alone.stdout and other == (0, "", "")


_ONE_FAILS = """
import os, sys
from ssmlx.commands.generate import main
adapter = "none" if os.environ["MLX_RANK"] == "0" else "missing"
sys.exit(main(["--adapter", adapter, *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_mlx_launch_ends_all_when_one_process_fails(base, tmp_path):
    script = tmp_path / "one_fails.py"
    script.write_text(_ONE_FAILS)
    port = 20_000 + os.getpid() * 2 % 10_000  # and the next: below those that connections get
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", 2, "--backend", "ring", "-p", port,
               "--", sys.executable, script, "--model", base, "--prompt", "w1"]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "ssmlx.generate (rank 1): error: " in done.stderr and mentions(done.stderr, "missing")
    assert done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.real
@pytest.mark.long
def test_the_real_model_on_three_processes_gives_the_tokens_of_one(tmp_path):
    asked = ["ssmlx.generate", "--adapter", "sql", "--prompt", "How many singers are there?",
             "--max-tokens", "12", "--tree-size", "6", "--jsonl"]  # fmt: skip
    alone = json.loads(run_module(*asked).stdout)
    (_, shown, _), *others = run_ranks(3, tmp_path, *asked)
    found = json.loads(shown)
    assert others == [(0, "", "")] * 2
    assert found["tokens"] == alone["tokens"]
    assert found["target_calls"] == alone["target_calls"] < 12
