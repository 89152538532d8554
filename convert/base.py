"""Base models for the PyTorch side, in float32; and published .bin weights as safetensors.

OPT is published as `pytorch_model.bin` alone, which is a pickle, and which MLX does not read.
`python -m ssmlx.convert.base FOLDER OUT` writes a folder that mlx-lm, `ssmlx` and transformers
load. No pickled code is run.
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


def load_base(
    path: str | Path,
    *,
    attn_implementation: str = "eager",  # "eager" or "sdpa"
) -> Any:
    """Load a causal language model in float32 on the CPU, from a folder of Hugging Face or mlx-lm.

    No code of the folder is run, and nothing is downloaded. Quantized weights are dequantized.
    """
    import torch

    folder = Path(path)
    settings = read_json(folder / "config.json", "a model folder")
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    with (
        _silence_transformers(),
        open_config(
            folder,
            f"{folder} cannot be loaded as a model",
            expected="a whole model folder that transformers can load",
            do="download or convert it again, or choose another model",
        ),
    ):
        if settings.get("quantization") is None:
            model, faults = _load_float(folder, options)
        else:
            model, faults = _load_quantized(folder, settings["quantization"], options)
        # A tied LM head is the embedding.
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
def _silence_transformers() -> Iterator[None]:
    """Raise the level of transformers' log inside the block; its progress bars stay off."""
    from transformers.utils import logging  # takes seconds

    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _load_float(
    folder: Path,
    options: Mapping[str, Any],  # "dtype" and "attn_implementation"
) -> tuple[Any, list[str]]:
    """Load float weights; those that transformers would draw at random raise, in words."""
    from transformers import AutoModelForCausalLM

    found = f"{folder} has LoRA beside its weights"
    do = "move adapter_config.json elsewhere"
    is_alone = not (folder / "adapter_config.json").exists()
    require(is_alone, found, expected="a model folder without an adapter", do=do)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,  # such weights are refused below
    )
    faults = [f"lacks {name}" for name in sorted(report["missing_keys"])]
    misshapen = sorted(str(name) for name, *_ in report["mismatched_keys"])
    return model, [*faults, *(f"has {name} in another shape" for name in misshapen)]


def _load_quantized(
    folder: Path,
    quantization: Mapping[str, Any],  # of that name in config.json
    options: Mapping[str, Any],
) -> tuple[Any, list[str]]:
    """Load mlx-lm's quantized weights; missing and unknown ones are reported as faults."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for name in ("quantization", "quantization_config"):
        if hasattr(config, name):
            delattr(config, name)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    report = model.load_state_dict(_read_dequantised(folder, quantization), strict=False)
    faults = [f"lacks {name}" for name in report.missing_keys]
    return model, [*faults, *(f"has an unknown {name}" for name in report.unexpected_keys)]


def _read_dequantised(folder: Path, quantization: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read model*.safetensors as float32 tensors by name."""
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
            own = quantization.get(module)  # mlx-lm may quantize single modules differently
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


def convert_pickles_to_safetensors(
    source: Path,  # has config.json, and files pytorch_model*.bin
    target: Path,  # a new folder, written whole or not at all
) -> None:
    """Write a copy of the folder as safetensors; names and dtypes stay; runs no pickled code."""
    check_torch()
    from huggingface_hub import save_torch_state_dict

    read_json(source / "config.json", "a model folder")
    pickles = sorted(source.glob(PICKLES))
    require(bool(pickles), f"{source} has no {PICKLES}", expected="such files", do="check the path")
    require(
        not target.exists(), f"{target} exists", expected="a new folder", do="choose another folder"
    )
    with atomic_folder(target) as folder:
        parts = (load_pickled_tensors(pickle).items() for pickle in pickles)
        save_torch_state_dict(dict(chain.from_iterable(parts)), folder)
        copy_settings_and_tokenizer(source, folder)


def copy_settings_and_tokenizer(source: Path, target: Path) -> None:
    """Copy all but the weights and their index, over files of the same name."""
    tokenizers = ("tokenizer.model", "*.tiktoken", "tiktoken.model")
    for pattern in ("*.json", "*.txt", "*.jinja", NAMED_JINJA_FILES, *tokenizers):
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            if not file.name.endswith(".index.json"):
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def load_pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load a .bin file on the CPU; no pickled code is run."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    try:
        for name, tensor in torch.load(path, "cpu", weights_only=True).items():
            # safetensors refuses tensors that share memory.
            memory = tensor.untyped_storage().data_ptr()
            own = tensor.detach()
            tensors[str(name)] = own.clone() if memory in taken else own.contiguous()
            taken.add(memory)
    except Exception as error:  # the unpickler raises many types, with long advice
        raise InputError(
            f"{path} cannot be read without running code ({type(error).__name__})",
            expected="a complete pickle of tensors",
            do="download or save it again, or use safetensors",
        ) from error
    return tensors


def main(argv: list[str] | None = None) -> int:
    description = "Write a model folder whose weights are .bin files with safetensors instead."
    epilog = "example:\n  python -m ssmlx.convert.base opt-125m opt-125m-safetensors"
    parser = make_parser(PROG, description, epilog)
    parser.add_argument("source", type=Path, metavar="FOLDER", help=f"has {PICKLES}")
    parser.add_argument("target", type=Path, metavar="OUT", help="the folder to write")
    args = parser.parse_args(argv)
    return run_command(lambda: convert_pickles_to_safetensors(args.source, args.target), PROG)


if __name__ == "__main__":
    sys.exit(main())
