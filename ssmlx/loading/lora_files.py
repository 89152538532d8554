"""LoRA and DoRA in files: mlx-lm's format, which is ours too, and PEFT's.

    mlx-lm  adapter_config.json        fine_tune_type; rank, scale and keys in lora_parameters
            adapters.safetensors       MODULE.lora_a [in, r], MODULE.lora_b [r, out], and of DoRA
                                       MODULE.m [out]; of experts lora_a [E, r, in] and
                                       lora_b [E, out, r]
    PEFT    adapter_config.json        r, lora_alpha and more, see `_TAKEN`
            adapter_model.safetensors  base_model.model.MODULE.lora_A.weight [r, in], lora_B.weight
                                       [out, r], and of DoRA lora_magnitude_vector.weight [out]; of
                                       embeddings lora_embedding_A [r, V], lora_embedding_B [D, r]

If an embedding is the LM head too, mlx-lm's LoRA acts on both, PEFT's on the embedding alone. Our
own files call the latter lora_embedding_a and lora_embedding_b.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import quoted, require
from ..json_files import read_json
from ..model.lora import LoraWeights, in_layer, split_layer_path
from ..settings import Allowed
from .folders import LORA_FILES, LORA_SETTINGS, PEFT_FILE, PEFT_PICKLE
from .module_patterns import ModulePatterns
from .tensors import check_tensors, read_tensors, write_tensors

SCALE = Allowed(least=-1e6, most=1e6)  # of LoRA
LORA_FILE = LORA_FILES["all"]
_LEAVES = ("lora_a", "lora_b", "m")
_EMBEDS = "lora_embedding_"
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)")
_EXPERT_LAYERS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names
_WHAT = "LoRA or DoRA, as mlx-lm and PEFT write it"
_MERGE = "merge it into its model with PEFT (merge_and_unload), and give that folder to --model"
_FUSE = "python -m mlx_lm fuse --model MODEL --adapter-path {} --save-path OUT, then --model OUT"

Loras = Mapping[str, LoraWeights]  # by module path


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_number(value: Any) -> bool:
    return SCALE.holds(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(name, str) for name in value)
    return isinstance(value, str)


def _are_layers(value: Any) -> bool:
    return value is None or all(map(_is_whole, value if isinstance(value, list) else [value]))


def _each_value(is_fit: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a setting is unset, or a dict whose values all pass `is_fit`."""
    return lambda value: not value or (isinstance(value, dict) and all(map(is_fit, value.values())))


_A_NUMBER = f"a number, {SCALE.in_words()}"
# PEFT's settings that are followed: the default, whether a value is valid, and the words for a
# message.
_TAKEN: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "peft_type": ("LORA", lambda kind: kind == "LORA", "'LORA'"),
    "bias": ("none", lambda kind: kind == "none", "'none'"),
    "r": (8, _is_rank, "a positive whole number"),
    "lora_alpha": (8, _is_number, _A_NUMBER),
    "use_rslora": (False, _is_flag, "true or false"),
    "use_dora": (False, _is_flag, "true or false"),
    "rank_pattern": ({}, _each_value(_is_rank), "positive whole numbers by module"),
    "alpha_pattern": ({}, _each_value(_is_number), "numbers by module"),
    "target_modules": (None, _are_names, "a list of names, all-linear, or a regular expression"),
    "layers_to_transform": (None, _are_layers, "layer numbers"),
    # PEFT's other ways to start change the base's weights too, so that the LoRA is another model's.
    "init_lora_weights": (
        True,
        lambda way: isinstance(way, bool) or way in ("gaussian", "eva", "orthogonal"),
        "an initialisation that leaves the base's weights unchanged",
    ),
}

# PEFT's settings that change nothing of what a trained LoRA computes. All others must be unset.
_ASIDE = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
}  # fmt: skip


def lora_tensors(lora: Loras) -> dict[str, mx.array]:
    """The tensors of LoRA by mlx-lm's names; of DoRA also MODULE.m, its norms."""
    found: dict[str, mx.array] = {}
    for path, weights in lora.items():
        parts = zip(_LEAVES, (weights.a, weights.b, weights.magnitude), strict=True)
        found |= {f"{path}.{leaf}": array for leaf, array in parts if array is not None}
    return found


def write_uniform_lora(folder: Path, lora: Loras, num_layers: int) -> None:
    """Write both files of LoRA on every row, over older ones, as mlx-lm's `--adapter-path` takes
    them.

    All modules have LoRA, or all DoRA, of one scale and rank: see `unify_rank_and_scale`.
    """
    # mlx-lm counts "num_layers" from the top; "keys" are paths inside a layer, or whole ones
    # outside.
    write_lora_file(folder / LORA_FILE, lora)
    weights = next(iter(lora.values()))
    places = [split_layer_path(path) for path in lora if in_layer(path)]
    others = [path for path in lora if not in_layer(path)]
    settings = {
        "fine_tune_type": "lora" if weights.magnitude is None else "dora",
        "num_layers": num_layers - min((layer for layer, _ in places), default=num_layers - 1),
        "lora_parameters": {
            "rank": weights.rank,
            "scale": weights.scale,
            "dropout": 0.0,
            "keys": sorted({*others, *(module for _, module in places)}),
        },
    }
    (folder / LORA_SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")


def write_lora_file(path: Path, lora: Loras) -> None:
    """Write the tensors of LoRA; scales are not written."""
    # LoRA of an embedding that does not act on the LM head has names of its own.
    apart = tuple(f"{module}.lora_" for module, one in lora.items() if not one.acts_on_head)
    tensors = {
        name.replace(".lora_", f".{_EMBEDS}") if name.startswith(apart) else name: array
        for name, array in lora_tensors(lora).items()
    }
    write_tensors(path, tensors)


def unify_rank_and_scale(lora: Loras) -> dict[str, LoraWeights]:
    """LoRA that computes the same with one scale and one rank, as mlx-lm's format needs."""
    scales = {weights.scale for weights in lora.values()}
    rank = max((weights.rank for weights in lora.values()), default=0)
    found = {}
    for path, weights in lora.items():
        more = rank - weights.rank  # filled up with zeros
        is_of_experts = weights.a.ndim == 3
        pad_a = [(0, 0), (0, more), (0, 0)][: weights.a.ndim]
        pad_b = [(0, 0), (0, 0), (0, more)] if is_of_experts else [(0, more), (0, 0)]
        if more:
            weights = replace(weights, a=mx.pad(weights.a, pad_a), b=mx.pad(weights.b, pad_b))
        if len(scales) > 1:
            weights = replace(weights, b=weights.scale * weights.b, scale=1.0)
        found[path] = weights
    return found


def stack_experts(
    lora: Loras,
    num_experts: Mapping[str, int],  # E, by the path of each expert layer of the model
) -> dict[str, LoraWeights]:
    """Stack the LoRA of single experts, as PEFT has it, into one for each of mlx-lm's expert
    layers.

    For example, mlp.experts.3.up_proj is expert 3 of mlp.switch_mlp.up_proj. Factors become [E, r,
    in] and [E, out, r], of zeros for experts without LoRA. DoRA and other modules stay as they are.
    """
    found = {}
    alone: dict[str, dict[int, str]] = {}
    for path, weights in lora.items():
        match = _EXPERT.fullmatch(path)
        layer = f"{match[1]}.switch_mlp.{_EXPERT_LAYERS.get(match[3], match[3])}" if match else ""
        if match and weights.magnitude is None and int(match[2]) < num_experts.get(layer, 0):
            alone.setdefault(layer, {})[int(match[2])] = path
        else:
            found[path] = weights
    for layer, paths in alone.items():
        same = unify_rank_and_scale({path: lora[path] for path in paths.values()})
        any_one = next(iter(same.values()))
        none = replace(any_one, a=mx.zeros_like(any_one.a), b=mx.zeros_like(any_one.b))
        every = [same[paths[n]] if n in paths else none for n in range(num_experts[layer])]
        a, b = (mx.stack([getattr(one, part).T for one in every]) for part in "ab")
        found[layer] = LoraWeights(a, b, any_one.scale)
    return found


def scale_of_first(lora: Loras) -> float | None:
    """The scale of the first module, as all modules of a file have one scale; None without LoRA."""
    return next((weights.scale for weights in lora.values()), None)


def read_lora_file(
    path: Path,
    what: str,  # the file should hold, for messages
    scale: float,  # from the settings
) -> dict[str, LoraWeights]:
    """LoRA by module path, in the file's dtypes, under mlx-lm's names of tensors or ours."""
    tensors = read_tensors(path, what)
    split = {name: name.rpartition(".")[::2] for name in tensors}
    apart = {path for path, leaf in split.values() if leaf.startswith(_EMBEDS)}
    split = {n: (path, leaf.replace(_EMBEDS, "lora_")) for n, (path, leaf) in split.items()}
    found = {f"{path}.{leaf}": tensors[name] for name, (path, leaf) in split.items()}
    modules = sorted({path for path, leaf in split.values() if leaf in _LEAVES})
    has_norms = any(f"{module}.m" in found for module in modules)
    _require_all_factors(found, modules, path, has_norms=has_norms)
    return {
        module: LoraWeights(
            found[f"{module}.lora_a"],
            found[f"{module}.lora_b"],
            scale,
            found.get(f"{module}.m"),
            module not in apart,
        )
        for module in modules
    }


def _require_all_factors(
    tensors: Mapping[str, mx.array],  # by mlx-lm's names
    modules: Iterable[str],
    path: Path,  # for messages
    *,
    has_norms: bool,  # it is DoRA
) -> None:
    """Refuse missing factors or norms, and tensors of other kinds; sizes are not compared."""
    expected: dict[str, tuple[int, ...]] = {}
    for module in modules:
        for leaf in _LEAVES if has_norms else _LEAVES[:2]:
            name = f"{module}.{leaf}"
            shape = tensors[name].shape if name in tensors else ()
            fits = len(shape) == 1 if leaf == "m" else len(shape) in (2, 3)
            expected[name] = shape if fits else (1, 1)[: 1 if leaf == "m" else 2]
    check_tensors(tensors, expected, path)


class FolderLora(NamedTuple):
    lora: dict[str, LoraWeights]  # by module path, as the files call the modules
    base_model: str  # the name of the model that it is for; empty if the files name none


def read_lora_folder(folder: Path) -> FolderLora:
    """LoRA or DoRA alone, as mlx-lm or PEFT wrote it."""
    settings = read_json(folder / LORA_SETTINGS, _WHAT)
    is_pefts = "peft_type" in settings or (folder / PEFT_FILE).exists()
    lora = _read_peft(folder, settings) if is_pefts else _read_mlx_lm(folder, settings)
    found = f"{folder} has no LoRA in its weights file"
    require(bool(lora), found, expected="pairs of LoRA matrices", do="use a LoRA's own files")
    name = settings.get("base_model_name_or_path" if is_pefts else "model")
    return FolderLora(lora, name if isinstance(name, str) else "")


def _read_mlx_lm(
    folder: Path,
    settings: Mapping[str, Any],  # the content of adapter_config.json
) -> dict[str, LoraWeights]:
    path = folder / LORA_SETTINGS
    kind = settings.get("fine_tune_type", "lora")
    require(
        kind != "full",
        f"{path} says that the whole model was trained (fine_tune_type 'full')",
        expected=_WHAT,
        do=f"fuse it: {_FUSE.format(folder)}",
    )
    parameters = settings.get("lora_parameters")
    given = parameters if isinstance(parameters, dict) else {}
    scale: Any = given.get("scale")
    is_fine = kind in ("lora", "dora") and _is_number(scale)
    found = f"{path} has fine_tune_type {quoted(kind)} and lora_parameters {quoted(parameters)}"
    expected = "lora or dora, and a scale among the parameters"
    require(is_fine, found, expected=expected, do="use the files that mlx_lm.lora wrote together")
    lora = read_lora_file(folder / LORA_FILE, _WHAT, float(scale))
    has_norms = any(weights.magnitude is not None for weights in lora.values())
    norms = {True: "norms", False: "no norms"}
    found = f"{folder / LORA_FILE} has {norms[has_norms]} beside its factors"
    expected = f"{norms[not has_norms]}, as {path} says {kind}"
    do = "use files that belong together"
    require(has_norms == (kind == "dora"), found, expected=expected, do=do)
    for module, weights in lora.items():
        _check_module_settings(path, module, weights, given.get("rank"), given.get("keys"))
    return lora


def _check_module_settings(
    path: Path,  # of the settings
    module: str,
    weights: LoraWeights,
    rank: Any,  # of the settings; None is not compared
    keys: Any,  # of the settings, ends of module paths; None names every module
) -> None:
    """Refuse LoRA whose rank or module is not the one that mlx-lm's settings name."""
    do = "use files that belong together"
    found = f"LoRA of rank {weights.rank} for {module}"
    expected = f"rank {quoted(rank)}, as {path} says"
    require(rank is None or rank == weights.rank, found, expected=expected, do=do)
    # A key is a path inside a layer, whatever the model calls its layers, or a whole path.
    named = [str(key) for key in keys] if isinstance(keys, list) else []
    is_named = keys is None or any(f".{module}".endswith(f".{key}") for key in named)
    found = f"LoRA for {module}, which the keys of {path} do not name"
    require(is_named, found, expected="modules that these keys name", do=do)


def _read_peft(
    folder: Path,
    settings: Mapping[str, Any],  # the content of adapter_config.json
) -> dict[str, LoraWeights]:
    """LoRA of PEFT's files, with factors transposed to mlx-lm's layout."""
    path = folder / LORA_SETTINGS
    _check_peft_settings(path, settings)
    given = {name: settings.get(name, default) for name, (default, _, _) in _TAKEN.items()}
    is_pickled = not (folder / PEFT_FILE).exists() and (folder / PEFT_PICKLE).exists()
    do = "save it again with PEFT's save_pretrained, which writes safetensors"
    found = f"{folder / PEFT_PICKLE} is a pickle, which may run code"
    require(not is_pickled, found, expected=PEFT_FILE, do=do)
    tensors = _with_mlx_names(read_tensors(folder / PEFT_FILE, _WHAT))
    split = (name.rpartition(".") for name in tensors)
    modules = sorted({module for module, _, leaf in split if leaf in _LEAVES})
    _require_all_factors(tensors, modules, folder / PEFT_FILE, has_norms=given["use_dora"])
    ranks, alphas = (
        ModulePatterns(f"{path} has the {name}", given[name] or {})
        for name in ("rank_pattern", "alpha_pattern")
    )
    lora = {}
    for module in modules:
        plain = module.removesuffix(_OF_EMBEDDING)
        _require_target(path, plain, given)
        a, b, norms = (tensors.get(f"{module}.{leaf}") for leaf in _LEAVES)
        assert a is not None and b is not None
        rank = ranks.find(plain, given["r"])
        alpha = alphas.find(plain, given["lora_alpha"])
        found = f"LoRA of rank {a.shape[0]} for {plain}"
        do = "use files that belong together"
        require(a.shape[0] == rank, found, expected=f"rank {rank}, as {path} says", do=do)
        scale = alpha / (math.sqrt(rank) if given["use_rslora"] else rank)
        # PEFT has both factors transposed.
        a, b = (mx.contiguous(array.T) for array in (a, b))
        lora[plain] = LoraWeights(a, b, float(scale), norms, plain == module)
    return lora


def _check_peft_settings(
    path: Path,  # for messages
    settings: Mapping[str, Any],
) -> None:
    """Refuse settings of PEFT that ask for more than LoRA or DoRA."""
    for name, value in settings.items():
        is_taken = name in _TAKEN or name in _ASIDE
        found = f"{path} has {name} {quoted(value)}"
        require(is_taken or not value, found, expected="it unset", do=_MERGE)
    for name, (default, is_fit, expected) in _TAKEN.items():
        value = settings.get(name, default)
        require(is_fit(value), f"{path} has {name} {quoted(value)}", expected=expected, do=_MERGE)


_OF_EMBEDDING = ".embedding"
_PEFT_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)\."
    r"(?P<leaf>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.weight)?"
)
_PEFT_LEAVES = {
    "lora_A": "lora_a",
    "lora_B": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "m",
}


def _with_mlx_names(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """PEFT's tensors by mlx-lm's names, not transposed; embeddings are marked `_OF_EMBEDDING`."""
    # PEFT also writes the base's own weights of embeddings and heads that have LoRA: these are
    # dropped. Tensors of unknown names keep them, and are refused later.
    found = {name: _PEFT_NAME.fullmatch(name) for name in tensors}
    matches = [match for match in found.values() if match is not None]
    embeddings = {one["path"] for one in matches if one["leaf"].startswith(_EMBEDS)}
    with_lora = {one["path"] for one in matches}
    named = {}
    for name, array in tensors.items():
        match = found[name]
        if match is None:
            base, _, rest = name.removeprefix("base_model.model.").partition(".base_layer.")
            if not (rest in ("weight", "bias") and base in with_lora):
                named[name] = array
            continue
        mark = _OF_EMBEDDING if match["path"] in embeddings else ""
        named[f"{match['path']}{mark}.{_PEFT_LEAVES[match['leaf']]}"] = array
    return named


def _require_target(
    path: Path,  # of the settings
    module: str,
    given: Mapping[str, Any],
) -> None:
    """Refuse LoRA of a module that PEFT's settings do not name."""
    targets = given["target_modules"]
    if isinstance(targets, str):  # all-linear, or a regular expression
        return
    is_named = any(module == name or module.endswith(f".{name}") for name in targets)
    layers = given["layers_to_transform"]
    # PEFT goes by the first number in a path, its versions of before July 2026 by the last, which
    # may be an expert's, and either by another one with `layers_pattern`.
    numbers = {part for part in module.split(".") if part.isdecimal()}
    if numbers and layers not in (None, []):
        listed = layers if isinstance(layers, list) else [layers]
        is_named &= not numbers.isdisjoint(map(str, listed))
    found = f"LoRA for {module}, which the target_modules of {path} do not name"
    do = "use files that belong together"
    require(is_named, found, expected="modules that they name", do=do)


def num_parameters(lora: Loras) -> int:
    return sum(array.size for weights in lora.values() for array in weights.arrays)


def describe_lora(lora: Loras) -> str:
    """LoRA in words, such as "LoRA of rank 8 on 9 modules (1,024 parameters)"."""
    ranks = sorted({weights.rank for weights in lora.values()})
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    is_dora = any(weights.magnitude is not None for weights in lora.values())
    kind = "DoRA" if is_dora else "LoRA"
    return f"{kind} of {shown} on {len(lora)} modules ({num_parameters(lora):,} parameters)"
