"""`python -m convert.train_heads`: train Medusa heads or an MLP speculator on a frozen model."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmlx.commands.options import make_parser, run
from ssmlx.errors import InputError
from ssmlx.loading.files import folder_digest, make_folder
from ssmlx.training.config import TrainConfig
from ssmlx.training.job import Job, bar, finish, prepare, read_base, run_to_end
from ssmlx.training.options import add_run_options, run_options

from .installed import check_torch
from .train import OPTIMISATION, add_machine_options, add_optimisation_options

if TYPE_CHECKING:
    from .reference.heads import HeadReference
    from .training.heads import HeadObjective

PROG = "convert.train_heads"
STATE_FILE, STORE_FILE = "state.pt", "hidden.states"
EPILOG = """examples:
  python -m convert.train_heads --kind medusa --data data/sql --out runs/medusa
  python -m convert --heads runs/medusa --out heads/medusa

  # an MLP speculator in the paper's two stages: on text, then on the model's own answers
  python -m convert.train_heads --kind mlp_speculator --data data/sql --out runs/stage1
  python -m convert.continuations --prompts prompts.jsonl --out data/own/train.jsonl
  python -m convert.train_heads --kind mlp_speculator --stage 2 --init runs/stage1 \\
      --data data/own --out runs/stage2

  # heads for a fine-tuned model: its LoRA is trained first, then frozen with the rest
  python -m convert.train --num-streams 0 --prune-rank 0 --data data/sql --out runs/lora
  python -m convert.train_heads --kind medusa --lora runs/lora --data data/sql --out runs/medusa

The run saves its state as it goes. Stop it when you like: the same command goes on, and ends
with the same weights. OUT then holds the heads in the form in which their kind is published,
log.jsonl and curves.png."""

_MEDUSA, _SPECULATOR = "medusa", "mlp_speculator"


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What is trained, beside the settings that all trainers share.

    Attributes:
        kind: "medusa" or "mlp_speculator".
        num_heads: tokens guessed ahead.
        num_layers: residual blocks of a Medusa head.
        share_lm_head: Medusa heads have no matrices: their blocks alone are trained.
        decay: lambda; head h of Medusa (from 0) has the weight lambda ** h in the loss.
        inner_dim: width of an MLP speculator's states; 0 for the model's.
        tie_weights, scale_input: as in `MlpSpeculatorConfig`.
        widths: branches of the tree at each stage.
        stage: of an MLP speculator's training: 1, on text; 2, on the model's own answers.
    """

    kind: str
    num_heads: int
    num_layers: int = 1
    share_lm_head: bool = False
    decay: float = 0.8
    inner_dim: int = 0
    tie_weights: bool = False
    scale_input: bool = False
    widths: tuple[int, ...] = ()
    stage: int = 1

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("num_heads", self.num_heads >= 1, "1 or more"),
            ("num_layers", self.num_layers >= 0, "0 or more"),
            ("num_layers", self.num_layers > 0 or not self.share_lm_head,
             "1 or more with --share-lm-head, or nothing would be trained"),
            ("decay", 0 < self.decay <= 1, "above 0, at most 1"),
            ("inner_dim", self.inner_dim >= 0, "0 or more"),
            ("widths", not self.widths or (len(self.widths) == self.num_heads
             and min(self.widths) >= 1), f"{self.num_heads} numbers of 1 or more, one a head"),
        ):  # fmt: skip
            if not ok:
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}",
                    expected=expected,
                    do="correct the option",
                )

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """Of each head."""
        rate = self.decay if self.kind == _MEDUSA else 1.0
        return tuple(rate**head for head in range(self.num_heads))


_DEFAULT_HEADS = {_MEDUSA: 4, _SPECULATOR: 3}
_MEDUSA_ONLY = ("num_layers", "share_lm_head", "decay")
_SPECULATOR_ONLY = ("inner_dim", "tie_weights", "scale_input", "widths", "stage")
_SHAPE = ("num_heads", "num_layers", "share_lm_head", "inner_dim", "tie_weights", "scale_input",
          "draft_vocab_size")  # fmt: skip
_OPTIMISATION = {
    **OPTIMISATION,
    "batch_size": (int, None, "examples a step (default: 16; 64 in stage 2)"),
    "learning_rate": (float, None, "AdamW's peak rate (default: 1e-3; 1e-4 in stage 2)"),
    "max_length": (int, None, "tokens of an example; longer answers are cut, longer prompts left "
                   "out (default: 512; 256 in stage 2)"),
}  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command's options. Those that only one kind has are None unless given."""
    parser = make_parser(PROG, "Train drafting heads on a frozen model, in PyTorch.", EPILOG)
    parser.add_argument("--kind", choices=(_MEDUSA, _SPECULATOR), required=True, help="which heads")
    add_run_options(parser)
    _add_head_options(parser)
    add_optimisation_options(parser, _OPTIMISATION)
    add_machine_options(parser, "the frozen model's hidden states")
    return parser.parse_args(argv)


def _add_head_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("heads")
    group.add_argument(
        "--num-heads", type=int, metavar="H",
        help="tokens guessed ahead (default: 4 Medusa heads, 3 stages)",
    )  # fmt: skip
    group.add_argument(
        "--draft-vocab-size", type=int, metavar="N",
        help="guess among this many of the data's most frequent tokens: a smaller matrix to train "
        "and to draft with; 0 for all (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--lora", type=Path, metavar="FOLDER",
        help="a checkpoint of `convert.train` (--num-streams 0): the model is the fine-tuned one",
    )  # fmt: skip
    group.add_argument(
        "--init", type=Path, metavar="FOLDER",
        help="published heads to go on from, such as those of stage 1",
    )  # fmt: skip
    own = parser.add_argument_group("Medusa heads")
    own.add_argument("--num-layers", type=int, metavar="L", help="residual blocks (default: 1)")
    own.add_argument(
        "--share-lm-head", action="store_const", const=True,
        help="no matrices: heads are residual blocks before the model's own LM head",
    )  # fmt: skip
    own.add_argument(
        "--decay", type=float, metavar="X",
        help="lambda: head h has the weight lambda ** h in the loss (default: 0.8)",
    )  # fmt: skip
    own = parser.add_argument_group("MLP speculator")
    own.add_argument("--stage", type=int, choices=(1, 2), help="1, on text; 2, on the model's own "
                     "answers, as `convert.continuations` writes them (default: 1)")  # fmt: skip
    own.add_argument("--inner-dim", type=int, metavar="N", help="width of the states; 0 for the "
                     "model's (default: 0)")  # fmt: skip
    own.add_argument("--tie-weights", action="store_const", const=True,
                     help="stages share their weights")  # fmt: skip
    own.add_argument("--scale-input", action="store_const", const=True,
                     help="norm the hidden state first")  # fmt: skip
    own.add_argument(
        "--widths", type=int, nargs="+", metavar="N",
        help="branches of the draft tree at each stage (default: 6 3 2, then 1)",
    )  # fmt: skip


def head_settings(args: argparse.Namespace, init: HeadReference | None) -> HeadSettings:
    """What the options ask for, or what `init` is.

    Raises:
        InputError: an option makes no sense, or would do nothing.
    """
    _reject(args, _SPECULATOR_ONLY if args.kind == _MEDUSA else _MEDUSA_ONLY, f"--kind {args.kind}")
    if args.stage == 2 and init is None:
        raise InputError(
            "--stage 2 without --init",
            expected="the heads of stage 1",
            do="train stage 1 first, and give its folder",
        )
    names = ("num_layers", "share_lm_head", "decay", "inner_dim", "tie_weights", "scale_input",
             "stage")  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    widths = tuple(args.widths or ())
    if init is None:
        heads = _DEFAULT_HEADS[args.kind] if args.num_heads is None else args.num_heads
        return HeadSettings(kind=args.kind, num_heads=heads, widths=widths, **given)
    _reject(args, _SHAPE, "--init, which has its own shape")
    shape: dict[str, Any] = {
        "num_heads": init.config.num_levels,
        "widths": widths or getattr(init.config, "widths", ()),
    }
    return HeadSettings(kind=args.kind, **shape, **given)


def _reject(args: argparse.Namespace, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} would do nothing with {where}",
                expected="no such option",
                do=f"drop {flag}",
            )


def head_train_config(args: argparse.Namespace, settings: HeadSettings, vocab: int) -> TrainConfig:
    """The settings that all trainers share; heads stand in the place of streams.

    Raises:
        InputError: one of them makes no sense.
    """
    late = settings.stage == 2
    defaults = {
        "batch_size": 64 if late else 16,
        "learning_rate": 1e-4 if late else 1e-3,
        "max_length": 256 if late else 512,
    }
    values = {name: getattr(args, name) for name in (*_OPTIMISATION, "schedule")}
    values |= {name: value for name, value in defaults.items() if values[name] is None}
    return TrainConfig(
        num_streams=settings.num_heads,
        num_msa_layers=1,
        prune_rank=0,
        stream_weights=settings.loss_weights,
        draft_vocab_size=vocab,
        **values,
    )


def read_init(args: argparse.Namespace, vocab_size: int) -> HeadReference | None:
    """The heads to go on from.

    Raises:
        InputError: they are broken, or of another kind.
    """
    if args.init is None:
        return None
    from .formats.heads import detect_kind, load_published

    kind = detect_kind(args.init)
    if kind != args.kind:
        raise InputError(
            f"--init {args.init} is a {kind}", expected=args.kind, do="give heads of one kind"
        )
    return load_published(args.init, vocab_size)


def build_heads(
    settings: HeadSettings, sizes: tuple[int, int], draft_vocab: Any, seed: int
) -> HeadReference:
    """New heads for a model of sizes (V, D)."""
    import torch

    from ssmlx.drafters.head_drafter import HeadConfig
    from ssmlx.drafters.medusa import MedusaConfig
    from ssmlx.drafters.mlp_speculator import MlpSpeculatorConfig

    from .reference.heads import new_reference

    torch.manual_seed(seed)
    vocab_size, width = sizes
    vocab = None if draft_vocab is None else torch.from_numpy(draft_vocab)
    both = {"vocab_size": vocab_size, "draft_vocab_size": 0 if vocab is None else len(vocab)}
    config: HeadConfig
    if settings.kind == _MEDUSA:
        shared = tuple(range(settings.num_heads)) if settings.share_lm_head else ()
        config = MedusaConfig(
            num_heads=settings.num_heads,
            num_layers=settings.num_layers,
            hidden_size=width,
            shared_heads=shared,
            **both,
        )
    else:
        config = MlpSpeculatorConfig(
            emb_dim=width,
            inner_dim=settings.inner_dim,
            n_predict=settings.num_heads,
            tie_weights=settings.tie_weights,
            scale_input=settings.scale_input,
            top_k_tokens_per_head=settings.widths,
            **both,
        )
    return new_reference(config, vocab)


def load_frozen(path: Path, lora: Path | None) -> Any:
    """The model that heads are trained for: a base model, or one with the LoRA of a checkpoint.

    Raises:
        InputError: the LoRA is broken, or acts on streams alone.
    """
    from ssmlx.settings import StreamConfig

    from .base import load_base
    from .reference.checkpoint import load_fine_tuned
    from .reference.model import StreamFusedReference

    base = load_base(path, attn_implementation="sdpa")
    if lora is None:
        sizes = {
            "num_layers": base.config.num_hidden_layers,
            "hidden_size": base.config.hidden_size,
        }
        return StreamFusedReference(base, StreamConfig(num_streams=0, num_msa_layers=1, **sizes))
    return load_fine_tuned(base, lora)


def check_continuations(path: Path) -> None:
    """Check that a data file holds a model's own answers.

    Raises:
        InputError: a line does not, or the file cannot be read.
    """
    from ssmlx.prompts import read_lines

    for number, line in read_lines(path, "--data"):
        if '"completion_tokens"' not in line:
            raise InputError(
                f"{path}, line {number} has no completion_tokens",
                expected="in stage 2, the model's own answers",
                do="make them with `python -m convert.continuations`",
            )


@dataclass(frozen=True, eq=False)
class _Plan:
    """A run, ready to go.

    Attributes:
        job: data and settings that all trainers share.
        settings: the heads' own.
        model: the heads to train, as they start.
        frozen: the model that they draft for.
        lm_head: [V, D] of that model, in float32.
    """

    job: Job
    settings: HeadSettings
    model: Any
    frozen: Any
    lm_head: Any


def _states_of(args: argparse.Namespace, job: Job, objective: HeadObjective, lora: str) -> Any:
    """What gives the hidden states of a batch: the store on disk, or the model itself."""
    from .training.lower_store import LowerStore, fits

    width = objective.hidden_size
    if not fits(job.examples, width, objective.dtype, args.cache_gb):
        return objective.lower
    identity = job.lower_identity("final norm", args.dtype, lora)
    path = job.options.out / STORE_FILE
    store = LowerStore(path, job.examples, width, objective.dtype, identity)
    store.fill(objective.lower, lambda batches: bar(batches, "frozen model"))
    return store.get


def _plan(args: argparse.Namespace) -> _Plan:
    """Read the data, the model and the heads to start from.

    Raises:
        InputError: they are broken, or do not fit each other.
    """
    from ssmlx.loading.names import resolve_model

    from .formats.heads import check_base_sizes

    options = run_options(args)
    init = read_init(args, read_base(resolve_model(options.model))["vocab_size"])
    settings = head_settings(args, init)
    vocab = None if init is None else init.draft_vocab
    vocab_size = (args.draft_vocab_size or 0) if vocab is None else len(vocab)
    if settings.stage == 2:
        check_continuations(options.data / "train.jsonl")
    job, path = prepare(options, head_train_config(args, settings, vocab_size))
    if init is not None:
        job = replace(job, draft_vocab=None if vocab is None else vocab.numpy())
    frozen = load_frozen(path, args.lora)
    lm_head = frozen.base.lm_head.weight.detach().clone()
    model = init or build_heads(settings, lm_head.shape, job.draft_vocab, job.train.seed)
    check_base_sizes(model.config, lm_head.shape[0], lm_head.shape[1], args.init)
    if init is None and settings.kind == _MEDUSA:
        model.start_from(lm_head)
    return _Plan(job, settings, model, frozen, lm_head)


def _main(args: argparse.Namespace) -> None:
    check_torch()
    import torch

    from .formats.heads import save_published
    from .training.heads import HeadObjective
    from .training.run import ReplayValidation, Run, choose_device

    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    plan = _plan(args)
    job, out = plan.job, plan.job.options.out
    make_folder(out)
    widths = plan.settings.widths or getattr(plan.model.config, "widths", ())
    objective = HeadObjective(plan.model, plan.frozen, job.train, widths, device, dtype)
    lora = folder_digest(args.lora)
    identity = job.identity(args.dtype, asdict(plan.settings), lora, folder_digest(args.init))
    state = Run(objective, job.num_steps)  # type: ignore[arg-type]
    record = run_to_end(
        job, state,
        prog=PROG, dtype=args.dtype, identity=identity, state_file=STATE_FILE,
        lower=lambda: _states_of(args, job, objective, lora),
        validation=lambda: ReplayValidation(objective, job.valid, job.options.tree_size),
    )  # fmt: skip
    save_published(plan.model, out, job.options.model, plan.lm_head)
    finish(job, state, record)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse_args(argv)
    return run(lambda: _main(args), PROG)


if __name__ == "__main__":
    raise SystemExit(main())
