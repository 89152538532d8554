"""Base models for the PyTorch side, in float32; and published .bin weights as safetensors.

OPT is published as `pytorch_model.bin` alone, which is a pickle, and which MLX does not read:

    python -m ssmlx.convert.base FOLDER OUT

writes a folder that mlx-lm, `ssmlx` and transformers load. No pickled code is run.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ssmlx.commands.parser import make_parser
from ssmlx.commands.running import run_command
from ssmlx.errors import InputError, require
from ssmlx.json_files import read_json
from ssmlx.loading.files import atomic_folder
from ssmlx.loading.model_config import open_config
from ssmlx.loading.tensors import read_tensors
from ssmlx.loading.tokenizer_files import NAMED_JINJA_FILES

from . import check_torch

if TYPE_CHECKING:
    import torch

PROG = "ssmlx.convert.base"
PICKLES = "pytorch_model*.bin"
_PACKING = ("group_size", "bits", "mode")


def load_base(path: str | Path, *, attn_implementation: str = "eager") -> Any:
    """Load a base model of transformers in float32 from a local folder.

    No code of the folder is run, and nothing is downloaded. Progress bars of transformers stay off
    afterwards.

    Args:
        path: a folder of Hugging Face's, or of mlx-lm with packed weights, which are dequantised.
        attn_implementation: "eager" or "sdpa".

    Returns:
        The causal language model, in evaluation mode, on the CPU.

    Raises:
        InputError: the folder cannot be loaded, has LoRA beside its weights, or lacks weights or
            has some in another shape; of packed ones, spare ones are refused too. A missing LM head
            is no fault where it is tied to the embedding.
    """
    import torch

    folder = Path(path)
    settings = read_json(folder / "config.json", "a model folder")
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    with (
        _silence_log_and_stop_bars(),
        open_config(
            folder,
            f"{folder} cannot be loaded as a model",
            expected="a whole model folder that transformers can load",
            do="download or convert it again, or choose another model",
        ),
    ):
        if settings.get("quantization") is None:
            model, faults = _load_unpacked_and_list_faults(folder, options)
        else:
            model, faults = _load_packed_and_list_faults(folder, settings["quantization"], options)
        if model.config.tie_word_embeddings:
            faults = [fault for fault in faults if fault != "lacks lm_head.weight"]
        require(
            not faults,
            f"{folder} {faults[0] if faults else ''}",
            expected=f"the weights of {type(model).__name__}",
            do="download or convert the base model again",
        )
    return model.eval()


@contextmanager
def _silence_log_and_stop_bars() -> Iterator[None]:
    """Keep transformers from showing warnings inside the block, and its bars from then on.

    The level of its log is put back after the block; its progress bars stay off.
    """
    from transformers.utils import logging  # takes seconds

    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _load_unpacked_and_list_faults(
    folder: Path, options: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Load a model whose weights transformers can read.

    Args:
        folder: of the model.
        options: "dtype" and "attn_implementation", as `from_pretrained` takes them.

    Returns:
        The model, in which transformers has drawn the weights that it did not find; and these
        faults, in words: weights missing, or of another shape.

    Raises:
        InputError: the folder has an adapter_config.json, whose LoRA transformers would load too.
    """
    from transformers import AutoModelForCausalLM

    found = f"{folder} has LoRA beside its weights"
    do = "keep adapter_config.json elsewhere"
    is_alone = not (folder / "adapter_config.json").exists()
    require(is_alone, found, expected="a model alone, as MLX leaves that aside", do=do)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,  # told below
    )
    faults = [f"lacks {name}" for name in sorted(report["missing_keys"])]
    misshapen = sorted(str(name) for name, *_ in report["mismatched_keys"])
    return model, [*faults, *(f"holds {name} in another shape" for name in misshapen)]


def _load_packed_and_list_faults(
    folder: Path, quantization: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Build a model from its config.json and mlx-lm's packed weights.

    Args:
        folder: of the model.
        quantization: of that name in config.json.
        options: "dtype" and "attn_implementation", as `from_config` takes them.

    Returns:
        The model; and its faults, in words: weights missing or spare.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for name in ("quantization", "quantization_config"):
        if hasattr(config, name):
            delattr(config, name)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    report = model.load_state_dict(_read_dequantised(folder, quantization), strict=False)
    faults = [f"lacks {name}" for name in report.missing_keys]
    return model, [*faults, *(f"holds an unknown {name}" for name in report.unexpected_keys)]


def _read_dequantised(folder: Path, quantization: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read all weights of an mlx-lm folder into float32 tensors, by name; packed ones are
    dequantised.

    Args:
        folder: whose files model*.safetensors are read.
        quantization: of the model; a value under a module's path is that module's own.
    """
    import torch

    packed: dict[str, Any] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        packed |= read_tensors(file, "a model's weights")
    weights = {}
    for name, array in packed.items():
        module, _, kind = name.rpartition(".")
        is_packed = f"{module}.scales" in packed
        if is_packed and kind in ("scales", "biases"):
            continue
        if is_packed and kind == "weight":
            own = quantization.get(module)  # where mlx-lm packed one module otherwise
            settings = {**quantization, **(own if isinstance(own, dict) else {})}
            settings = {key: settings[key] for key in _PACKING if key in settings}
            scales = packed[f"{module}.scales"]
            biases = packed.get(f"{module}.biases")
            if biases is not None:
                scales = scales.astype(mx.float32)
                biases = biases.astype(mx.float32)
            # on the CPU: the same bits on every machine
            array = mx.dequantize(array, scales, biases, **settings, stream=mx.cpu)
        weights[name] = torch.from_numpy(np.array(array.astype(mx.float32)))
    return weights


def convert_pickles_to_safetensors(source: Path, target: Path) -> None:
    """Copy a model folder whose weights are .bin files, with safetensors in their place; the source
    stays as it is.

    Names and dtypes of the weights stay. Of the other files, settings and tokenizer are copied: see
    `copy_settings_and_tokenizer`. No pickled code is run.

    Args:
        source: has config.json, and files pytorch_model*.bin.
        target: a new folder, written whole or not at all.

    Raises:
        InputError: there are no such files, they cannot be read, `target` exists, or PyTorch is not
            installed.
    """
    check_torch()
    from huggingface_hub import save_torch_state_dict

    read_json(source / "config.json", "a model folder")
    pickles = sorted(source.glob(PICKLES))
    require(
        bool(pickles), f"{source} has no {PICKLES}", expected="such weights", do="check the path"
    )
    require(not target.exists(), f"{target} exists", expected="a new folder", do="choose another")
    with atomic_folder(target) as folder:
        parts = (load_pickled_tensors(pickle).items() for pickle in pickles)
        save_torch_state_dict(dict(chain.from_iterable(parts)), folder)
        copy_settings_and_tokenizer(source, folder)


def copy_settings_and_tokenizer(source: Path, target: Path) -> None:
    """Copy the settings and the tokenizer of a model folder into another, over files of the same
    name.

    These are all *.json, *.txt, *.jinja, *.tiktoken and tokenizer.model at its top and the chat
    templates of other names, but no index of weights (*.index.json).

    Args:
        source: the model folder.
        target: a folder that exists.
    """
    tokenizers = ("tokenizer.model", "*.tiktoken", "tiktoken.model")
    for pattern in ("*.json", "*.txt", "*.jinja", NAMED_JINJA_FILES, *tokenizers):
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            if not file.name.endswith(".index.json"):
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def load_pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a .bin file, by name, on the CPU; no pickled code is run.

    Types stay. Of tensors that share memory, all but the first are copied.

    Raises:
        InputError: the file cannot be read, or holds more than tensors.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    try:
        for name, tensor in torch.load(path, "cpu", weights_only=True).items():
            memory = tensor.untyped_storage().data_ptr()
            own = tensor.detach()
            tensors[str(name)] = own.clone() if memory in taken else own.contiguous()
            taken.add(memory)
    except Exception as error:  # the unpickler raises many kinds, with long advice in them
        raise InputError(
            f"{path} cannot be read without running code ({type(error).__name__})",
            expected="a whole pickle of tensors alone",
            do="download or save it again, or take safetensors",
        ) from error
    return tensors


def main(argv: list[str] | None = None) -> int:
    """Run `python -m ssmlx.convert.base`: write a model folder of .bin files with safetensors.

    Args:
        argv: the words after the command; None for the process's own.

    Returns:
        The exit code, as `run_command` has it.
    """
    description = "Write a model folder whose weights are .bin files with safetensors instead."
    epilog = "example:\n  python -m ssmlx.convert.base opt-125m opt-125m-safetensors"
    parser = make_parser(PROG, description, epilog)
    parser.add_argument("source", type=Path, metavar="FOLDER", help=f"has {PICKLES}")
    parser.add_argument("target", type=Path, metavar="OUT", help="the folder to write")
    args = parser.parse_args(argv)
    return run_command(lambda: convert_pickles_to_safetensors(args.source, args.target), PROG)


if __name__ == "__main__":
    sys.exit(main())
