"""The PyTorch trainer: eq. 5, resuming, and what it writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ssmlx

torch = pytest.importorskip("torch")
from real import LAYERS, VOCAB, WIDTH, kill_once_there, one_line, words, write_base
from torch.nn import functional as F

from convert.__main__ import main as convert
from convert.base import load_base
from convert.reference.checkpoint import load_reference
from convert.reference.format import LoraSettings
from convert.reference.losses import linear_cross_entropy, mean_scales
from convert.reference.model import StreamFusedReference
from convert.train import PROG, STATE_FILE, STORE_FILE, main
from convert.training.run import TorchObjective, TorchTrainer, build_model, freeze_base
from ssmlx.errors import InputError
from ssmlx.settings import StreamConfig
from ssmlx.training.batches import BatchPlan, collate
from ssmlx.training.config import TrainConfig
from ssmlx.training.data import Example
from ssmlx.training.job import SETTINGS_FILE
from ssmlx.training.lower_store import LowerStore
from ssmlx.training.record import LOG_FILE, read_record

SMALL = (
    "--num-streams", "2", "--num-msa-layers", "2", "--lora-rank", "4", "--prune-rank", "4",
    "--batch-size", "4", "--device", "cpu", "--template", "{prompt}", "--valid-count", "4",
    "--save-every", "3", "--valid-every", "5", "--learning-rate", "0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("train") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four questions, each answered by the five words after it, six times over."""
    folder = tmp_path_factory.mktemp("data")
    lines = [
        {"prompt": words(1 + i % 3, first=i), "completion": words(5, first=i + i % 3 + 1)}
        for i in [0, 1, 2, 3] * 6
    ]
    for name in ("train", "valid"):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def argv(base, data, out, *more):
    return ["--model", str(base), "--data", str(data), "--out", str(out), *SMALL, *more]


def make_objective(base, dtype=torch.float32, draft_vocab=None, **changes):
    settings = {"num_streams": 3, "num_msa_layers": 2, "lora_rank": 4, "prune_rank": 4, **changes}
    train = TrainConfig(**settings)
    shared = ("num_streams", "num_msa_layers", "stream_init", "stream_init_rank", "prune_rank",
              "adapter_scope", "stream_design", "rotation_step")  # fmt: skip
    config = StreamConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        draft_vocab_size=0 if draft_vocab is None else len(draft_vocab),
        **{name: getattr(train, name) for name in shared},
    )
    model = build_model(load_base(base, attn_implementation="sdpa"), config, train, draft_vocab)
    with torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.endswith("lora_B.weight"):
                parameter.normal_(std=0.1)
    freeze_base(model, dtype)
    return TorchObjective(model, train, draft_vocab, torch.device("cpu"), dtype)


def random_examples(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 5)), int(rng.integers(2, 9))) for _ in range(count)]
    return [Example(rng.integers(0, VOCAB, p + a).astype(np.int32), p) for p, a in sizes]


# Losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_loss_and_its_gradient_are_those_of_cross_entropy(monkeypatch, with_bias):
    monkeypatch.setattr("ssmlx.training.objective._CHUNK_LOGITS", 7 * 11)  # several chunks
    torch.manual_seed(0)
    hidden = torch.randn(23, 5, requires_grad=True)
    weight, bias = torch.randn(11, 5), torch.randn(11) if with_bias else None
    targets = torch.randint(0, 11, (23,))
    targets[::4] = -1
    total, losses = linear_cross_entropy(hidden, weight, bias, targets, mean_scales(targets, 0.3))
    total.backward()
    twin = hidden.detach().clone().requires_grad_()
    expected = 0.3 * F.cross_entropy(F.linear(twin, weight, bias), targets, ignore_index=-1)
    expected.backward()
    assert torch.allclose(total, expected, atol=1e-6)
    assert torch.allclose(hidden.grad, twin.grad, atol=1e-6)
    assert losses[::4].abs().sum() == 0
    assert losses.sum() / (targets >= 0).sum() == pytest.approx(expected.item() / 0.3, abs=1e-5)


@pytest.mark.parametrize("scope", ["all", "streams"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_batch_costs_what_eq_5_says_of_each_example(base, scope, reduced):
    """Padded and bucketed, the sum is what the plain forward gives example by example."""
    vocab = np.arange(0, VOCAB, 2, dtype=np.int32) if reduced else None
    alphas = (0.5, 0.25, 0.125)
    objective = make_objective(
        base, draft_vocab=vocab, adapter_scope=scope, stream_weights=alphas, prune_weight=0.0
    )
    examples = random_examples(5)
    batch = collate(examples, np.arange(5))
    with torch.no_grad():
        total, parts = objective.loss(batch, objective.lower(batch), 0)
    losses = {stream: [] for stream in range(4)}
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long()
        with torch.no_grad():
            output = objective.model(tokens[None])
        for place in range(example.start - 1, len(tokens) - 1):
            for stream in range(4):
                if place + stream + 1 >= len(tokens):
                    continue
                logits, target = output.main_logits[0, place], int(tokens[place + stream + 1])
                if stream:
                    logits = output.stream_logits[0, place, stream - 1]
                    if reduced and target % 2:
                        continue
                    target = target // 2 if reduced else target
                losses[stream].append(float(F.cross_entropy(logits, torch.tensor(target))))
    means = [float(np.mean(losses[stream])) for stream in range(4)]
    assert ("main_loss" in parts) == (scope == "all")
    for stream in (1, 2, 3):
        assert parts[f"stream_{stream}_loss"] == pytest.approx(means[stream], abs=1e-4)
    expected = sum(a * m for a, m in zip(alphas, means[1:], strict=True))
    assert float(total) == pytest.approx(expected + (means[0] if scope == "all" else 0), abs=1e-4)


def test_the_pruning_loss_reaches_its_adapter_alone(base):
    objective = make_objective(base, stream_weights=(0.0,), main_weight=0.0, prune_weight=1.0)
    batch = collate(random_examples(5), np.arange(5))
    run = TorchTrainer(objective, 10)
    total, parts = objective.loss(batch, objective.lower(batch), 0)
    total.backward()
    assert parts["prune_loss"] > 0
    moved = {n for n, p in run.named.items() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved == {"prune_adapter.lora_A.weight", "prune_adapter.lora_B.weight"}


def test_scope_streams_leaves_the_main_stream_as_it_was(base):
    objective = make_objective(base, adapter_scope="streams")
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        expected = load_base(base)(tokens).logits
        before = objective.model(tokens)
    run = TorchTrainer(objective, 20)
    plan = BatchPlan(random_examples(8), 4, 0)
    for step in range(6):
        run.advance(plan.batch(step), objective.lower(plan.batch(step)))
    with torch.no_grad():
        after = objective.model(tokens)
    assert torch.allclose(after.main_logits, expected, atol=1e-4)
    assert (after.stream_logits - before.stream_logits).abs().max() > 1e-3


@pytest.mark.parametrize("changes", [{"num_streams": 0}, {"adapter_scope": "streams"}])
def test_every_trained_weight_moves(base, changes):
    objective = make_objective(base, **changes)
    run = TorchTrainer(objective, 10)
    before = {name: p.detach().clone() for name, p in run.named.items()}
    plan = BatchPlan(random_examples(16), 8, 0)
    for step in range(2):
        run.advance(plan.batch(step), objective.lower(plan.batch(step)))
    still = [name for name, p in run.named.items() if torch.equal(p, before[name])]
    assert still == []
    assert all("linear.weight" not in name for name in run.named)


def test_a_gradient_that_is_no_number_spoils_no_state(base, data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(TrainConfig, "rate", lambda train, step, num_steps: 1e30)
    assert main(argv(base, data, out, "--save-every", "1")) == 2
    assert "the gradient of step 2 is nan" in capsys.readouterr().err.splitlines()[-1]
    assert torch.load(out / STATE_FILE, weights_only=True)["step"] == 1


def test_a_step_that_is_refused_leaves_the_weights(base):
    objective = make_objective(base)
    run, plan = TorchTrainer(objective, 10), BatchPlan(random_examples(8), 4, seed=0)
    before = {name: weight.detach().clone() for name, weight in run.named.items()}
    lower = torch.full_like(objective.lower(plan.batch(0)), torch.nan)
    with pytest.raises(InputError, match="the gradient of step 1 is nan"):
        run.advance(plan.batch(0), lower)
    assert all(torch.equal(run.named[name], weight) for name, weight in before.items())
    assert run.step == 0


def test_bfloat16_holds_what_is_trained_in_float32(base):
    objective = make_objective(base, dtype=torch.bfloat16)
    run = TorchTrainer(objective, 10)
    assert {p.dtype for p in run.named.values()} == {torch.float32}
    frozen = [p for p in objective.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    batch = collate(random_examples(5), np.arange(5))
    exact = make_objective(base)
    _, rough = objective.loss(batch, objective.lower(batch), 0)
    _, fine = exact.loss(batch, exact.lower(batch), 0)
    for name, value in fine.items():
        assert rough[name] == pytest.approx(value, rel=0.03)


def test_stored_lower_states_are_those_of_the_layers(base, tmp_path):
    objective, examples = make_objective(base), random_examples(70)
    calls = []

    lower = objective.lower

    def counted(batch):
        calls.append(len(batch.indices))
        return lower(batch)

    objective.lower = counted

    def store():
        return LowerStore(tmp_path / "states", examples, objective)

    store().fill()
    assert sum(calls) == 70
    store().fill()
    assert sum(calls) == 70  # nothing is computed twice
    batch = collate(examples, np.array([3, 44, 9]))
    found, expected = store().get(batch), objective.lower(batch)
    for row, (pad, length) in enumerate(zip(batch.pads, batch.lengths, strict=True)):
        span = slice(pad, pad + length)
        assert torch.allclose(found[row, span], expected[row, span], atol=1e-4)
    with pytest.raises(IndexError):
        LowerStore(tmp_path / "states", examples[:3], objective).get(batch)


# The command --------------------------------------------------------------------------------


def weights(out):
    from safetensors.torch import load_file

    return load_file(out / "streams.safetensors") | load_file(out / "adapter_model.safetensors")


def test_a_run_that_stops_goes_on_to_the_same_result(base, data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(argv(base, data, whole, "--epochs", "2")) == 0
    for stop in ("4", "7"):
        assert main(argv(base, data, parts, "--epochs", "2", "--max-steps", stop)) == 0
    assert main(argv(base, data, parts, "--epochs", "2")) == 0
    left, right = weights(whole), weights(parts)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    logs = [read_record(out / LOG_FILE) for out in (whole, parts)]
    assert [e["step"] for e in logs[1]] == list(range(1, 13))
    assert [e["main_loss"] for e in logs[0]] == [e["main_loss"] for e in logs[1]]


def test_a_killed_run_goes_on_to_the_same_result(base, data, tmp_path):
    out = tmp_path / "killed"
    arguments = argv(base, data, out, "--epochs", "30", "--save-every", "2")
    kill_once_there(out / STATE_FILE, "convert.train", arguments)
    killed_at = torch.load(out / STATE_FILE, weights_only=True)["step"]
    assert 0 < killed_at < 180
    assert main(arguments) == 0
    whole = tmp_path / "whole"
    assert main(argv(base, data, whole, "--epochs", "30", "--save-every", "2")) == 0
    left, right = weights(whole), weights(out)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_it_learns_shows_when_it_decodes(base, data, tmp_path):
    """From data to an adapter that answers in fewer calls, and as plain decoding does."""
    run, adapter = tmp_path / "run", tmp_path / "adapter"
    assert main(argv(base, data, run, "--epochs", "60", "--draft-vocab-size", "60")) == 0
    last = read_record(run / LOG_FILE)[-1]
    assert last["tokens_per_call"] > 1.8
    assert last["stream_2_loss"] < 0.5 * read_record(run / LOG_FILE)[0]["stream_2_loss"]
    assert json.loads((run / SETTINGS_FILE).read_text())["draft_vocab_coverage"] == 1.0
    assert (run / "curves.png").stat().st_size > 10_000
    assert convert(["--base", str(base), "--lora", str(run), "--out", str(adapter)]) == 0
    model, tokenizer = ssmlx.load(str(base), adapter=adapter)
    config = ssmlx.GenerateConfig(max_tokens=8)
    answers = {}
    for decoding in ("streaming", "plain"):
        prompt = tokenizer.encode(words(1, first=3))
        found = list(ssmlx.stream_generate(model, tokenizer, prompt, config, decoding=decoding))
        answers[decoding] = [t for r in found for t in r.tokens], found[-1].target_calls
    assert answers["streaming"][0] == answers["plain"][0]
    assert tokenizer.decode(answers["plain"][0]).startswith(words(5, first=4))
    assert answers["streaming"][1] <= 4 < 6 <= answers["plain"][1]


def test_lora_alone_is_the_baseline(base, data, tmp_path):
    run, adapter = tmp_path / "run", tmp_path / "adapter"
    options = argv(base, data, run, "--num-streams", "0", "--prune-rank", "0", "--epochs", "1")
    assert main(options) == 0
    assert load_reference(load_base(base), run).config.num_streams == 0
    assert convert(["--base", str(base), "--lora", str(run), "--out", str(adapter)]) == 0
    model, tokenizer = ssmlx.load(str(base), adapter=adapter)
    assert model.num_streams == 0
    assert ssmlx.generate(model, tokenizer, words(3), max_tokens=3)


def test_a_run_starts_from_another_runs_weights(base, data, tmp_path):
    """From a LoRA alone: its LoRA at step 0, streams anew; a stopped run still goes on."""
    lora, out, twin = (tmp_path / name for name in ("lora", "out", "twin"))
    alone = ("--num-streams", "0", "--prune-rank", "0", "--max-steps", "4")
    assert main(argv(base, data, lora, *alone)) == 0
    still = ("--init", str(lora), "--learning-rate", "1e-30", "--max-steps", "1")
    assert main(argv(base, data, out, *still)) == 0
    first, started = load_reference(load_base(base), lora), load_reference(load_base(base), out)
    for path, module in first.adapters.items():
        assert module.adapter.lora_B.weight.abs().sum() > 0
        assert torch.allclose(
            module.adapter.lora_B.weight, started.adapters[path].adapter.lora_B.weight
        )
    assert started.stream_embeddings.abs().sum() > 0
    whole = tmp_path / "whole"
    for folder, stops in ((whole, ("6",)), (twin, ("3", "6"))):
        for stop in stops:
            assert main(argv(base, data, folder, "--init", str(lora), "--max-steps", stop)) == 0
    left, right = weights(whole), weights(twin)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--lora-rank", "8", "--lora-alpha", "64"), "of shape ["),
        (("--lora-rank", "8"), "has the scale alpha / rank 8"),
        (("--num-streams", "3"), "stream_embeddings of shape [2,"),
        (("--prune-rank", "0"), "expected none of that name"),
        (("--num-msa-layers", "1"), "have num_msa_layers 2"),
        (("--stream-init", "identity"), "have stream_init low_rank"),
        (("--stream-init-rank", "8"), "have stream_init_rank 32"),
        (("--stream-design", "value_rotation", "--rotation-step", "0.1"), "have stream_design emb"),
    ],
)
def test_a_start_of_other_settings_is_refused(base, data, tmp_path, capsys, more, said):
    first = tmp_path / "first"
    assert main(argv(base, data, first, "--max-steps", "1")) == 0
    capsys.readouterr()
    options = argv(base, data, tmp_path / "run", "--init", str(first), *more)
    assert main(options) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    options = argv(base, data, tmp_path / "run", "--init", str(tmp_path / "nowhere"))
    assert main(options) == 2
    assert "does not exist" in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run" / STATE_FILE).exists()


def test_without_room_for_the_store_the_layers_run_every_step(base, data, tmp_path):
    assert main(argv(base, data, tmp_path / "run", "--epochs", "1", "--cache-gb", "0")) == 0
    assert not (tmp_path / "run" / STORE_FILE).exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--num-msa-layers", "9"), "num_msa_layers is 9 of 4 layers"),
        (("--lora-modules", "query"), "no linear module query"),
        (("--template", "no place"), "no place"),
        (("--epochs", "0"), "--epochs 0"),
        (("--stream-weights", "1", "2", "3"), "--stream-weights"),
        (("--data", "nowhere"), "does not exist"),
        (("--max-length", "1"), "no example that fits"),
        (("--device", "cuda"), "cuda"),
    ],
)
def test_bad_options_are_told_in_one_line(base, data, tmp_path, capsys, more, said):
    if more == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(argv(base, data, tmp_path / "run", *more)) == 2
    assert said in one_line(capsys.readouterr().err, PROG)
    assert not (tmp_path / "run" / STATE_FILE).exists()


def test_another_runs_folder_is_refused(base, data, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(argv(base, data, out, "--max-steps", "3")) == 0
    before = (out / STATE_FILE).read_bytes()
    capsys.readouterr()
    assert main(argv(base, data, out, "--seed", "5")) == 2
    assert "other settings" in one_line(capsys.readouterr().err, PROG)
    assert (out / STATE_FILE).read_bytes() == before
    (out / STATE_FILE).write_bytes(before[: len(before) // 2])
    assert main(argv(base, data, out)) == 2
    assert "cannot be read" in one_line(capsys.readouterr().err, PROG)


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Phi3"])
@pytest.mark.parametrize("design", ["embeddings", "value_rotation"])
def test_sparse_stream_attention_is_the_dense_one(monkeypatch, architecture, design):
    from test_reference import LAYERS, VOCAB, WIDTH
    from test_reference import make_base as make_torch_base

    from convert.reference.stream_attention import stream_attention, use_stream_attention

    config = StreamConfig(
        num_streams=3,
        num_msa_layers=2,
        num_layers=LAYERS,
        hidden_size=WIDTH,
        stream_design=design,
        rotation_step=0.1 if design == "value_rotation" else 0.0,
    )
    torch.manual_seed(3)
    base = make_torch_base(architecture, attention="sdpa")
    model = StreamFusedReference(base, config, lora=LoraSettings(2))
    batch = collate(random_examples(4), np.arange(4))
    tokens = torch.from_numpy(batch.tokens).long() % VOCAB
    where = {
        "positions": torch.from_numpy(batch.positions).long(),
        "visible": torch.from_numpy(batch.visible),
        "stream_rows": torch.from_numpy(batch.carriers),
    }

    def gradients():
        model.zero_grad()
        output = model(tokens, **where)
        (output.stream_logits.sin().sum() + output.main_logits.sin().sum()).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        return output.stream_logits.detach(), grads

    dense, dense_grads = gradients()
    calls = []
    monkeypatch.setattr(
        "convert.reference.stream_attention.stream_attention",
        lambda *args: calls.append(1) or stream_attention(*args),
    )
    use_stream_attention(base, 3)
    sparse, sparse_grads = gradients()
    assert len(calls) == config.num_msa_layers
    assert torch.allclose(sparse, dense, atol=1e-5)
    for name, gradient in dense_grads.items():
        assert torch.allclose(sparse_grads[name], gradient, atol=1e-4), name
