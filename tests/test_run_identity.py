"""Identities of training runs: in a run's state, and of what its frozen layers gave.

Runs that were stopped go on by these, so each of the four ways to train keeps its own order.
"""

import hashlib
import json
from dataclasses import asdict, replace

import mlx.core as mx
import pytest

torch = pytest.importorskip("torch")
import real
from tiny import slow
from tiny_adapt import AMOUNTS, RATES, Stopped
from tiny_lora import write_lora
from trainers import ALONE, MLX, OWN, TORCH

from convert import train_heads
from convert.train_heads import HeadSettings
from convert.training.run import TorchTrainer
from ssmlx.loading.identity import folder_digest, stored_weights_digest
from ssmlx.training import adapt_rounds, job
from ssmlx.training.adapt_run import (
    DATA_FOLDER,
    AdaptOptions,
    AdaptPlan,
    AdaptRun,
    load_source,
)
from ssmlx.training.config import TrainConfig
from ssmlx.training.mlx_trainer import MlxTrainer
from ssmlx.training.progress import Clock
from ssmlx.training.sizing import Round

ONE_STEP = ("--max-steps", "1")
MLX_DTYPE, TORCH_DTYPE = "mlx.core.float32", "float32"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return real.write_data(tmp_path_factory.mktemp("data"), real.questions(range(8)))


@pytest.fixture(scope="module")
def made(base, data, tmp_path_factory):
    """Folders to start from: LoRA alone of either trainer, streams, and Medusa heads."""
    shelf = tmp_path_factory.mktemp("made")
    heads = heads_argv(base, data, shelf / "heads")
    assert train_heads.main(heads) == 0
    return {
        "lora": MLX.train(base, data, shelf / "lora", *ALONE, *ONE_STEP),
        "torch lora": TORCH.train(base, data, shelf / "torch", *ALONE, *ONE_STEP),
        "adapter": MLX.train(base, data, shelf / "streams", *OWN, *ONE_STEP),
        "heads": shelf / "heads",
    }


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that were read, in turn."""
    found = []
    read = job.read_job

    def read_and_keep(*args, **more):
        found.append(read(*args, **more))
        return found[-1]

    for module in (job, adapt_rounds):
        monkeypatch.setattr(module, "read_job", read_and_keep)
    return found


def heads_argv(base, data, out, *more):
    options = ("--kind", "medusa", "--model", base, "--data", data, "--out", out, "--num-heads", 2,
               "--template", "{prompt}", "--batch-size", 4, "--valid-count", 2, "--device", "cpu",
               "--dtype", "float32", *ONE_STEP, *more)  # fmt: skip
    return [str(one) for one in options]


def without(argv, *options):
    """Options that --init decides left out, with their values."""
    pairs = zip(argv[::2], argv[1::2], strict=True)
    return [one for name, value in pairs if name not in options for one in (name, value)]


def digest_of(model, examples, *values):
    """SHA-256 over the weights' digest and JSON values, then the examples."""
    said = json.dumps([stored_weights_digest(model), *values], sort_keys=True)
    digest = hashlib.sha256(said.encode())
    for example in examples:
        digest.update(example.tokens.tobytes() + example.start.to_bytes(4, "big"))
    return digest.hexdigest()


def expected_identities(base, made, frozen, run):
    """Of the frozen layers' results, and of the run, by the values that decide each."""
    config = made.config
    return (
        digest_of(base, made.examples, config.num_layers, config.insertion_layer, *frozen),
        digest_of(
            base,
            made.examples,
            made.train.to_dict(),
            replace(config, base_model="").to_dict(),
            *run,
        ),
    )


def written_identities(out, store="lower.states"):
    """Of the frozen layers' results, and of the run, as a run's folder has them."""
    frozen = json.loads((out / f"{store}.json").read_text())["identity"]
    state = out / TorchTrainer.STATE_FILE
    if state.exists():
        return frozen, torch.load(state, weights_only=True)["identity"]
    _, metadata = mx.load(str(out / MlxTrainer.STATE_FILE), return_metadata=True)
    return frozen, metadata["identity"]


RUNS = {
    # Options; then what decides the frozen layers, and the run, beside settings and examples.
    "mlx": (MLX, [], [MLX_DTYPE], [MLX_DTYPE]),
    "mlx init": (MLX, ["--init", "lora"], [MLX_DTYPE], [MLX_DTYPE, "lora"]),
    "mlx task": (
        MLX, [*OWN, "--task-lora", "lora"], [MLX_DTYPE, "lora"], [MLX_DTYPE, "lora"]
    ),
    "mlx task and init": (
        MLX,
        [*OWN, "--task-lora", "lora", "--init", "adapter"],
        [MLX_DTYPE, "lora"],
        [MLX_DTYPE, "lora", "adapter"],
    ),
    "mlx part": (
        MLX,
        ["--init", "adapter", "--train-only", "streams"],
        [MLX_DTYPE, "adapter"],
        [MLX_DTYPE, "adapter"],
    ),
    "torch": (TORCH, [], [TORCH_DTYPE], [TORCH_DTYPE]),
    "torch init": (
        TORCH, ["--init", "torch lora"], [TORCH_DTYPE], [TORCH_DTYPE, "torch lora"]
    ),
    "torch task": (
        TORCH,
        [*OWN, "--task-lora", "torch lora"],
        [TORCH_DTYPE, "torch lora"],
        [TORCH_DTYPE, "torch lora"],
    ),
    "torch part": (
        TORCH,
        ["--init", "adapter", "--train-only", "streams"],
        [TORCH_DTYPE, "adapter"],
        [TORCH_DTYPE, "adapter", "adapter"],
    ),
}  # fmt: skip


OFTEN = ("mlx part", "torch part")


@pytest.mark.parametrize("name", [*OFTEN, *slow(*(name for name in RUNS if name not in OFTEN))])
def test_a_run_is_told_by_its_folders(base, data, made, jobs, tmp_path, name):
    command, more, *values = RUNS[name]
    argv = command.argv(base, data, tmp_path, *ONE_STEP, *(made.get(one, one) for one in more))
    if "--train-only" in more:
        argv = without(argv, "--num-streams", "--num-msa-layers", "--lora-rank", "--prune-rank")
    assert command.main(argv) == 0
    frozen, run = (
        [folder_digest(made[one]) if one in made else one for one in value] for value in values
    )
    assert written_identities(tmp_path) == expected_identities(base, jobs[0], frozen, run)


@pytest.mark.parametrize("starts", [True, *slow(False)])
def test_heads_are_told_by_their_folders(base, data, made, jobs, tmp_path, starts):
    lora, init = (made["torch lora"], made["heads"]) if starts else (None, None)
    more = ("--lora", lora, "--init", init) if starts else ()
    argv = heads_argv(base, data, tmp_path, *more)
    assert train_heads.main(without(argv, "--num-heads") if starts else argv) == 0
    of_lora, of_init = map(folder_digest, (lora, init))  # of None, too
    settings = asdict(HeadSettings(kind="medusa", num_heads=2))
    expected = expected_identities(
        base,
        jobs[0],
        ["final norm", TORCH_DTYPE, of_lora],
        [TORCH_DTYPE, of_lora, settings, of_init],
    )
    assert written_identities(tmp_path, "hidden.states") == expected


@pytest.mark.parametrize(("number", "tuned"), [(1, True), *slow((0, False), (0, True), (1, False))])
def test_a_round_of_adapt_is_told_by_its_folders(
    base, data, made, jobs, tmp_path, monkeypatch, number, tuned
):
    lora = write_lora(tmp_path / "lora", base) if tuned else None
    options = AdaptOptions(
        model=str(base), path=base, out=tmp_path / "out", adapter=lora, amounts=AMOUNTS
    )
    calls = []

    def stop_at_second_step():
        calls.append(1)
        if len(calls) == 2:
            raise Stopped

    run = AdaptRun(
        options=options,
        prompts=[],
        settings={},
        prog="ssmlx.adapt",
        say=lambda line: None,
        wait=stop_at_second_step,
        clock=Clock(),
    )
    planned = Round(hours=1.0, answers=12, epochs=4, answer_seconds=1.0, train_seconds=1.0)
    plan = AdaptPlan(
        settings={},
        base={},
        train=TrainConfig(num_streams=2, num_msa_layers=2, batch_size=4, adapter_scope="streams"),
        step_costs={2: 1.0},
        rates=RATES,
        rounds=(planned, planned),
    )
    folder = options.round_folder(number)
    rows = [{"prompt": real.words(1 + n), "completion": real.words(3, first=n)} for n in range(8)]
    real.write_data(folder / DATA_FOLDER, rows)
    if number:
        options.adapter_folder.parent.mkdir(exist_ok=True)
        options.adapter_folder.symlink_to(made["adapter"])
    source = load_source(run)
    with pytest.raises(Stopped):
        adapt_rounds.train_round(run, plan, number, source)
    of_lora = [folder_digest(lora)] if tuned else []
    of_start = [folder_digest(folder / "start")] if number else []
    assert written_identities(folder) == expected_identities(
        base, jobs[0], [MLX_DTYPE, *of_lora], [MLX_DTYPE, *of_lora, *of_start]
    )
