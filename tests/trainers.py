"""Both trainers, as their commands are run on tiny data."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import refusals

from convert import train as torch_command
from convert.training.run import (
    TorchTrainer,
)
from ssmlx.commands import train as mlx_command
from ssmlx.loading.tensors import read_tensors
from ssmlx.training.mlx_trainer import MlxTrainer

SMALL = (
    "--num-streams", "2", "--num-msa-layers", "2", "--lora-rank", "4", "--prune-rank", "4",
    "--batch-size", "4", "--template", "{prompt}", "--valid-count", "4", "--dtype", "float32",
    "--save-every", "3", "--valid-every", "5", "--learning-rate", "0.01",
)  # fmt: skip
ALONE = ("--num-streams", "0", "--prune-rank", "0")
OWN = ("--adapter-scope", "streams")


@dataclass(frozen=True)
class Command:
    """One of the two training commands; `result` is what of its folder --init takes."""

    prog: str
    main: Callable[[list[str]], int]
    state: str
    result: str
    options: tuple[str, ...] = ()

    def argv(self, base, data, out, *more):
        options = ("--model", base, "--data", data, "--out", out, *SMALL, *self.options, *more)
        return [str(option) for option in options]

    def train(self, base, data, out, *more):
        """Train, which must succeed; gives what --init takes."""
        assert self.main(self.argv(base, data, out, *more)) == 0
        return out / self.result

    def refusal(self, capsys, base, data, out, *more):
        """The one line that a run is refused with."""
        capsys.readouterr()
        assert self.main(self.argv(base, data, out, *more)) == 2
        prog = self.prog.replace("convert.", "ssmlx.convert.")
        return refusals.one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], prog)

    def weights(self, out):
        """The bytes of what was trained, by name."""
        files = sorted((out / self.result).glob("*.safetensors"))
        found = [read_tensors(file, "weights") for file in files]
        return {name: np.array(array).tobytes() for part in found for name, array in part.items()}


MLX = Command("ssmlx.train", mlx_command.main, MlxTrainer.STATE_FILE, mlx_command.TRAINED_FOLDER)
TORCH = Command(
    "convert.train", torch_command.main, TorchTrainer.STATE_FILE, "", ("--device", "cpu")
)
