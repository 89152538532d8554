"""Who answers in `perf.quality`: adapters, the LoRA without streams, and the untouched base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ssmlx.errors import InputError, check_choice
from ssmlx.loading.adapter import read_lora
from ssmlx.loading.attach import check_base, check_lora
from ssmlx.loading.load import load, load_base, load_tokenizer
from ssmlx.loading.names import CONFIG_FILE, resolve_adapter
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import RowScope, attach_lora
from ssmlx.model.streams import StreamFusedModel
from ssmlx.plan import make_plan
from ssmlx.settings import GenerateConfig, read_json

from .common import split_name
from .samples import read_own_lora

MLX_LM = "mlx-lm"
Variants = Mapping[str, GenerateConfig | None]


@dataclass(frozen=True)
class ModelUnderTest:
    """Weights that answer in `perf.quality`.

    Attributes:
        name: as in the table.
        role: "adapter" streams; "baseline" is LoRA alone and "base" what streams of scope
            "streams" draft for, both plain.
        folder: of the adapter or the LoRA; None for the base.
        scope: of the LoRA.
        template, end_tokens: of its prompts and answers.
        extra_parameters: beside LoRA.
        variants: how it answers: settings by label, or None for mlx-lm's own loop.
        task: folder of the LoRA that every row has beside streams of scope "streams", if any.
    """

    name: str
    role: Literal["adapter", "baseline", "base"]
    folder: Path | None
    scope: str
    template: str | None
    end_tokens: tuple[int, ...]
    extra_parameters: int
    variants: Variants
    task: Path | None = None

    @property
    def wording(self) -> tuple[str | None, tuple[int, ...], Path | None]:
        """What systems must have in common for their prompts and answers to be the same."""
        return self.template, self.end_tokens, self.task


def named_adapters(items: Iterable[str]) -> dict[str, Path]:
    """Folders by name; `NAME=FOLDER`, or a folder or bundled adapter whose own name will do.

    Raises:
        InputError: two have one name, a name is taken, or it is no adapter's.
    """
    adapters: dict[str, Path] = {}
    for item in items:
        name, folder = split_name(item)
        if name is None:
            name = Path(item).expanduser().resolve().name
        if not name or name in adapters or name in ("base", "baseline", MLX_LM):
            raise InputError(
                f"--adapter {item}: the name {name!r} is empty or taken",
                expected="a name of its own for each adapter",
                do="write --adapter NAME=FOLDER",
            )
        found = resolve_adapter(folder)
        if found is None:
            raise InputError(
                f"--adapter {item}", expected="an adapter", do="give a folder or a bundled name"
            )
        adapters[name] = found
    return adapters


def adapter_system(
    name: str,
    folder: Path,
    backbone: Backbone,
    streaming: Mapping[str, GenerateConfig],
    template: str | None,
) -> ModelUnderTest:
    """An adapter with streams, checked against the base model and the trees."""
    adapter = read_own_lora(folder)
    check_base(adapter, backbone)
    check_lora(backbone.model, adapter.lora, folder)
    model = StreamFusedModel(backbone, adapter.config, adapter.streams)
    for config in streaming.values():
        make_plan(model, config)
    settings = adapter.config
    return ModelUnderTest(
        name,
        "adapter",
        folder,
        settings.adapter_scope,
        template or settings.prompt_template,
        tuple(settings.end_token_ids),
        adapter.streams.num_parameters,
        streaming,
        folder if adapter.task_lora else None,
    )


def base_systems(
    adapters: Iterable[ModelUnderTest], plain: Mapping[str, GenerateConfig]
) -> list[ModelUnderTest]:
    """What each adapter of scope "streams" drafts for, without it, under the same prompts.

    That is the untouched base, or the base with the LoRA of a task.
    """
    bases: dict[Any, ModelUnderTest] = {}
    for system in adapters:
        if system.scope == "streams" and system.wording not in bases:
            name = f"base, as {system.name}" if bases else "base"
            if system.task is not None:
                name = f"{system.name} without streams"
            bases[system.wording] = replace(
                system, name=name, role="base", folder=system.task,
                scope="all" if system.task else "none", extra_parameters=0, variants=plain,
            )  # fmt: skip
    return list(bases.values())


def baseline_system(
    folder: Path,
    backbone: Backbone,
    plain: Mapping[str, GenerateConfig],
    first: ModelUnderTest,
    template: str | None,
) -> ModelUnderTest:
    """LoRA without streams; its template is its own where it has one, else the first adapter's."""
    folder = folder.expanduser()
    check_lora(backbone.model, read_lora(folder, "--baseline"), folder)
    own: dict[str, Any] = {}
    if (folder / CONFIG_FILE).exists():
        own = read_json(folder / CONFIG_FILE, "the settings of an ssmlx adapter")
    ends = tuple(own.get("end_token_ids") or first.end_tokens)
    template = template or own.get("prompt_template") or first.template
    return ModelUnderTest("baseline", "baseline", folder, "all", template, ends, 0, plain)


def with_mlx_lm(systems: list[ModelUnderTest], wanted: str | None) -> list[ModelUnderTest]:
    """Let the `wanted` system answer by mlx-lm's own loop too; "" is the first.

    Raises:
        InputError: no system has that name.
    """
    if wanted is None:
        return systems
    name = wanted or systems[0].name
    names = [system.name for system in systems]
    check_choice("--with-mlx-lm", name, names)
    return [
        replace(s, variants={**s.variants, MLX_LM: None}) if s.name == name else s for s in systems
    ]


def load_system(path: Path, system: ModelUnderTest) -> tuple[StreamFusedModel, TokenizerWrapper]:
    """The weights of a system in float32, and a tokenizer that knows its end tokens."""
    if system.role == "adapter":
        fused, tokenizer = load(str(path), adapter=system.folder, dtype="float32")
    else:
        backbone, settings = load_base(path, "float32")
        tokenizer, scope = load_tokenizer(path, settings), RowScope(0)
        if system.folder is not None:
            lora = read_lora(system.folder, "--baseline")
            attach_lora(backbone.model, lora, scope, merge=True, dtype=backbone.dtype)
        fused = StreamFusedModel(backbone, scope=scope)
    # mlx-lm and the plain systems must stop where the adapter does.
    tokenizer.eos_token_ids = set(tokenizer.eos_token_ids) | set(system.end_tokens)
    return fused, tokenizer
