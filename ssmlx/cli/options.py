"""The options that every command shares, and how a command fails.

Light on purpose: `--help` must not wait for MLX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..bundled import bundled_adapters
from ..config import DEFAULT_MODEL, DTYPES, PruneConfig, TreeConfig
from ..errors import InputError

if TYPE_CHECKING:
    from ..api import GenerateConfig


class Parser(argparse.ArgumentParser):
    """An argument parser that tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(module: str, description: str, epilog: str) -> Parser:
    """A parser for `python -m <module>`."""
    return Parser(
        prog=f"python -m {module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model_options(parser: argparse.ArgumentParser, default_adapter: str | None = None) -> None:
    """Which model and adapter to load.

    Args:
        parser: where the options go.
        default_adapter: what `load_from` will be given, for the help.
    """
    bundled = ", ".join(bundled_adapters()) or "none in this installation"
    default = f"{default_adapter}, where it belongs to the model" if default_adapter else "none"
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a local folder (mlx-lm or Hugging Face layout), a Hub name such as "
        "org/name, or an alias (default: %(default)s)",
    )
    group.add_argument(
        "--adapter",
        metavar="NAME|FOLDER",
        help="the streams that draft, and LoRA: a folder that `python -m convert` wrote, or the "
        f"name of an adapter that ships with ssmlx ({bundled}); `none` decodes plainly. A folder "
        f"in the working directory comes before a name (default: {default}; a fused model folder "
        "brings its own)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="weights as stored, or unpacked and cast; auto: as stored on a GPU, float32 on "
        "the CPU (default: %(default)s)",
    )


def add_decoding_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How to decode. Options that another one makes meaningless have no default, see below."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--decoding",
        choices=("streaming", "plain"),
        help="streaming: draft with the adapter's streams, same answer in fewer forward passes; "
        "plain: one token a pass (default: streaming with an adapter, else plain)",
    )
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="longest answer (default: %(default)s)"
    )
    group.add_argument(
        "--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)"
    )
    group.add_argument("--seed", type=int, help="seed of the sampler (default: a new one each run)")
    add_tree_options(parser.add_argument_group("draft tree (streaming only)"))


def add_tree_options(group: argparse._ArgumentGroup) -> None:
    """What to draft. Options that another one makes meaningless have no default."""
    group.add_argument(
        "--num-streams",
        type=int,
        metavar="G",
        help="tokens to draft ahead, no more than the adapter was trained with (default: all)",
    )
    group.add_argument(
        "--tree",
        choices=("full", "best"),
        help="full: every combination of K children a level, 1 + K + ... + K^G nodes; best: the "
        "N likeliest nodes (default: best)",
    )
    group.add_argument(
        "--tree-width",
        type=int,
        metavar="K",
        help="children a level (default: 3 for full, no limit for best)",
    )
    group.add_argument(
        "--tree-size",
        type=int,
        metavar="N",
        help=f"nodes of the best tree, the root included (default: {TreeConfig().size})",
    )
    group.add_argument(
        "--prune",
        choices=("off", "budget", "threshold"),
        help="drop unlikely nodes before the upper layers, by early exit: budget keeps the M "
        "likeliest, threshold those with a probability of P or more (default: off)",
    )
    group.add_argument(
        "--prune-to",
        type=int,
        metavar="M",
        help=f"nodes that a budget keeps (default: {PruneConfig().keep})",
    )
    group.add_argument(
        "--prune-threshold",
        type=float,
        metavar="P",
        help=f"least probability of a child given its parent (default: {PruneConfig().threshold})",
    )


def generate_config(args: argparse.Namespace) -> GenerateConfig:
    """The settings that the options ask for.

    Raises:
        InputError: a value is out of range, or an option could have no effect.
    """
    from ..api import GenerateConfig

    _reject_idle_options(args)
    tree = TreeConfig(**_given(kind=args.tree, width=args.tree_width, size=args.tree_size))
    prune = PruneConfig(
        **_given(kind=args.prune, keep=args.prune_to, threshold=args.prune_threshold)
    )
    return GenerateConfig(
        decoding=args.decoding,
        max_tokens=args.max_tokens,
        tree=tree,
        prune=prune,
        num_streams=args.num_streams,
        temp=args.temp,
        seed=args.seed,
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


_TREE_OPTIONS = (
    "num_streams", "tree", "tree_width", "tree_size", "prune", "prune_to", "prune_threshold",
)  # fmt: skip


def _reject_idle_options(args: argparse.Namespace) -> None:
    """An option that could change nothing is a mistake, not a no-op."""
    if args.decoding == "plain":
        _reject(args, _TREE_OPTIONS, "streaming decoding")
    if args.tree == "full":
        _reject(args, ("tree_size",), "--tree best")
    if args.prune != "budget":
        _reject(args, ("prune_to",), "--prune budget")
    if args.prune != "threshold":
        _reject(args, ("prune_threshold",), "--prune threshold")


def _reject(args: argparse.Namespace, names: tuple[str, ...], needs: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} would do nothing here", expected=needs, do=f"drop {flag}")


def load_from(args: argparse.Namespace, default_adapter: str | None = None) -> Any:
    """The model and tokenizer that the options name.

    Args:
        args: the options.
        default_adapter: a bundled adapter to use where none is named, the model brings no
            streams, and the adapter belongs to the model; `args.adapter` then names it.
    """
    from ..loading import adapters_for, load, swap_adapter

    model, tokenizer = load(args.model, adapter=args.adapter, dtype=args.dtype)
    if args.adapter is None and default_adapter is not None and model.num_streams == 0:
        folder = adapters_for(model).get(default_adapter)
        if folder is not None:
            model = swap_adapter(model, folder)
            args.adapter = default_adapter
    if model.num_streams == 0:
        _reject(args, _TREE_OPTIONS, "a model with streams, that is an --adapter")
    return model, tokenizer


def run(main: Callable[[], int | None], prog: str) -> int:
    """Run a command: exit code 2 and one line for bad input, 130 for Ctrl-C."""
    try:
        return main() or 0
    except InputError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
