"""Adapters that `ssmlx.adapt` made on this machine, found by the weights they were made from."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..blas import this_machine
from ..errors import InputError
from ..json_files import read_json
from .folders import CONFIG_FILE, FIGURES_FILE, PLAN_FILE, TRAINED_FOLDER, adapters_home
from .identity import stored_shapes_digest, stored_weights_digest

PAYS = 1.05
"""The speed over that without an adapter from which on it is used by itself."""
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True)
class StoredRun:
    """A run of `ssmlx.adapt` as it lies on disk, finished or not.

    Attributes:
        folder: of the run.
        plan: the content of its plan.json.
        figures: the content of its adapter's figures.json; empty before the run has ended.
    """

    folder: Path
    plan: Mapping[str, Any]
    figures: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def adapter(self) -> Path:
        """The adapter's folder, which may not be there yet."""
        return self.folder / TRAINED_FOLDER

    @property
    def has_adapter(self) -> bool:
        return (self.adapter / CONFIG_FILE).is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the adapter is there and was measured after the last round that is planned."""
        return self.has_adapter and self.figures.get("rounds") == len(self.plan["rounds"])

    @property
    def changed(self) -> float:
        """When the settings file of the adapter, or the plan where there is no adapter, was last
        changed; seconds since the epoch.
        """
        file = self.adapter / CONFIG_FILE if self.has_adapter else self.folder / PLAN_FILE
        return file.stat().st_mtime

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that must be the same for the run to go on, see
        `ssmlx.training.adapt_run.fixed_settings`.
        """
        settings: Mapping[str, Any] = self.plan["settings"]
        return settings

    @property
    def model(self) -> str:
        """The model as it was named."""
        return str(self.plan["base"]["model"])

    @property
    def model_folder(self) -> Path:
        """Where the model lay."""
        return Path(self.plan["base"]["folder"])

    @property
    def hours(self) -> float:
        """Hours that were planned for the run in all; 0 before anything was."""
        return float(self.plan["rounds"][-1]["hours"]) if self.plan["rounds"] else 0.0

    @property
    def is_for_base(self) -> bool:
        """Whether the streams draft for the model itself, not for the model with a LoRA."""
        return "adapter" not in self.settings

    @property
    def why_outdated(self) -> str:
        """What the adapter of a run is that is not for a model's very weights.

        Earlier versions noted a digest of samples of the weights, which says too little of them.
        """
        is_digest_of_all = "-" in str(self.settings["weights"])
        weights = "from other weights than are there"
        return f"made {weights if is_digest_of_all else 'by an earlier version'}"

    @property
    def speed_up(self) -> float | None:
        """The speed of whole answers with the adapter, as a multiple of plain decoding's; None
        where it was not measured, or not on this machine.
        """
        figures = self.figures.get("figures") or {}
        is_here = figures.get("machine") == ", ".join(this_machine())
        return float(figures["speed_up"]) if is_here else None

    @property
    def pays(self) -> bool:
        """Whether the adapter drafts without being asked for: True where it was not measured on
        this machine, else by `is_worth_using`.
        """
        return self.speed_up is None or is_worth_using(self.figures["figures"])

    @property
    def speed_up_text(self) -> str:
        """A phrase for the user: the speed-up that was measured on this machine, and that of prompt
        lookup where it was faster than plain decoding; or that nothing was measured here.
        """
        if self.speed_up is None:
            return "not measured on this machine"
        text = float(self.figures["figures"]["text_speed_up"])
        without = f" ({text:.2f} without it)" if text > 1 else ""
        return f"{self.speed_up:.2f} times plain decoding's speed{without} when it was made"

    def is_called(self, name: str, folder: Path) -> bool:
        """Whether the run was made from a model in this folder, or of this name.

        Names are compared without what follows an @; a name that is a path here is compared by
        `folder` alone.

        Args:
            name: what a model is called.
            folder: where it lies.
        """
        is_same = self.model.partition("@")[0] == name.partition("@")[0]
        return self.model_folder == folder.resolve() or (is_same and not Path(name).exists())


def is_worth_using(measured: Mapping[str, Any]) -> bool:
    """Whether measured answers with an adapter were at least 5 % faster than both plain decoding
    and prompt lookup.

    Args:
        measured: figures of a run, as `ssmlx.adapt` writes them: "speed_up" and "text_speed_up".
    """
    return float(measured["speed_up"]) >= PAYS * max(1.0, float(measured["text_speed_up"]))


def read_adapt_runs() -> list[StoredRun]:
    """Read every run of `ssmlx.adapt` that is kept on this machine, see `adapters_home`.

    Returns:
        The runs with a plan, those that changed last first; those whose files cannot be read or
        lack something are left out.
    """
    found = []
    for path in adapters_home().glob(f"*/{PLAN_FILE}"):
        with suppress(InputError, LookupError, TypeError, ValueError, AttributeError, OSError):
            run = StoredRun(
                path.parent, read_json(path, "the plan of a run"), _figures(path.parent)
            )
            # What is asked of every one.
            _ = run.settings["weights"], run.model, run.model_folder, run.hours, run.pays
            found.append((run.changed, run))
    return [run for _, run in sorted(found, key=lambda one: one[0], reverse=True)]


def _figures(folder: Path) -> dict[str, Any]:
    """Read the figures.json of the adapter in a run's folder; empty where there is no such file.

    Raises:
        InputError: the file is no JSON object.
    """
    path = folder / TRAINED_FOLDER / FIGURES_FILE
    return read_json(path, "the figures of an adapter") if path.exists() else {}


@dataclass(frozen=True)
class FoundRuns:
    """Runs that belong to a model, in each list those that changed last first. Some may have no
    adapter yet.

    Attributes:
        fitting: made from its very weights, without a LoRA.
        outdated: made from other weights in the same folder, or of the same name, without a LoRA;
            or by an earlier version.
        tuned: made from its very weights with a LoRA on them.
    """

    fitting: tuple[StoredRun, ...] = ()
    outdated: tuple[StoredRun, ...] = ()
    tuned: tuple[StoredRun, ...] = ()

    @property
    def chosen(self) -> StoredRun | None:
        """The run whose adapter drafts without being asked for: the newest of `fitting` that has an
        adapter and `pays`; None where there is none.
        """
        return next((one for one in self.fitting if one.has_adapter and one.pays), None)


def find_runs_by_weights(model_folder: Path | None, model_name: str) -> FoundRuns:
    """Find the runs that belong to the model in a folder, by the digest of its weights.

    Where a run is of weights of the same names, types and shapes, all bytes of the weights are
    read, see `stored_weights_digest`.

    Args:
        model_folder: None for a model that was made in memory, to which no run belongs.
        model_name: what the model is called.

    Returns:
        The runs; none where the weights cannot be read, which is logged.
    """
    every = read_adapt_runs() if model_folder is not None else []
    if model_folder is None or not every:
        return FoundRuns()
    try:
        shapes = stored_shapes_digest(model_folder)
        like = [run for run in every if str(run.settings["weights"]).startswith(shapes)]
        digest = stored_weights_digest(model_folder) if like else None
    except (InputError, OSError) as error:  # the model's own loader tells what is wrong with it
        _log.debug("no adapter is looked for: %s", error)
        return FoundRuns()
    same = [run for run in like if run.settings["weights"] == digest]
    others = [run for run in every if run not in same and run.is_called(model_name, model_folder)]
    return FoundRuns(
        tuple(run for run in same if run.is_for_base),
        tuple(run for run in others if run.is_for_base),
        tuple(run for run in same if not run.is_for_base),
    )


def log_outdated_if_none_chosen(found: FoundRuns, model_name: str) -> None:
    """Log, at level info, that the newest outdated adapter is not used, and the option that takes
    it all the same.

    Nothing is logged where no outdated run has an adapter, or where an adapter is chosen.

    Args:
        found: the runs that belong to the model.
        model_name: what the model is called.
    """
    outdated = [run for run in found.outdated if run.has_adapter]
    if outdated and found.chosen is None:
        _log.info(
            "the adapter %s was %s, and is not used for %s; --adapter %s takes it all the same",
            outdated[0].name, outdated[0].why_outdated, model_name, outdated[0].name,
        )  # fmt: skip
