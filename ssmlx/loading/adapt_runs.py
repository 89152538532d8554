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

PAYS = 1.05  # times the speed without the adapter: from here on it is used by default
_log = logging.getLogger("ssmlx")


@dataclass(frozen=True)
class StoredRun:
    """A run of `ssmlx.adapt` on disk, finished or not."""

    folder: Path
    plan: Mapping[str, Any]  # the content of plan.json
    # the content of the adapter's figures.json; empty before the run has ended
    figures: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def adapter(self) -> Path:
        """The adapter's folder, which may not exist yet."""
        return self.folder / TRAINED_FOLDER

    @property
    def has_adapter(self) -> bool:
        return (self.adapter / CONFIG_FILE).is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the adapter was measured after the last planned round."""
        return self.has_adapter and self.figures.get("rounds") == len(self.plan["rounds"])

    @property
    def changed(self) -> float:
        """When its adapter, or its plan before there is one, last changed: seconds since 1970."""
        file = self.adapter / CONFIG_FILE if self.has_adapter else self.folder / PLAN_FILE
        return file.stat().st_mtime

    @property
    def settings(self) -> Mapping[str, Any]:
        """What must stay the same if the run is to be continued: `adapt_run.fixed_settings`."""
        settings: Mapping[str, Any] = self.plan["settings"]
        return settings

    @property
    def model(self) -> str:
        """The model as the user named it."""
        return str(self.plan["base"]["model"])

    @property
    def model_folder(self) -> Path:
        return Path(self.plan["base"]["folder"])

    @property
    def hours(self) -> float:
        """Hours planned in all; 0 if nothing is planned yet."""
        return float(self.plan["rounds"][-1]["hours"]) if self.plan["rounds"] else 0.0

    @property
    def is_for_base(self) -> bool:
        """Whether its streams draft for the model itself, not for the model with a LoRA."""
        return "adapter" not in self.settings

    @property
    def why_outdated(self) -> str:
        # Earlier versions noted a digest of samples of the weights, which is too little.
        is_digest_of_all = "-" in str(self.settings["weights"])
        weights = "from other weights than these"
        return f"made {weights if is_digest_of_all else 'by an earlier version'}"

    @property
    def speed_up(self) -> float | None:
        """Speed of whole answers over that of plain decoding; None if not measured on this
        machine."""
        figures = self.figures.get("figures") or {}
        is_here = figures.get("machine") == ", ".join(this_machine())
        return float(figures["speed_up"]) if is_here else None

    @property
    def pays(self) -> bool:
        """Whether the adapter drafts by default; an adapter not measured here is trusted."""
        return self.speed_up is None or is_worth_using(self.figures["figures"])

    @property
    def speed_up_text(self) -> str:
        """The speed-up for users; prompt lookup's own is named if it had one."""
        if self.speed_up is None:
            return "not measured on this machine"
        text = float(self.figures["figures"]["text_speed_up"])
        without = f" ({text:.2f} without it)" if text > 1 else ""
        return f"{self.speed_up:.2f} times plain decoding's speed{without} when it was made"

    def is_called(self, name: str, folder: Path) -> bool:
        """Whether it was made from the model in `folder`, or one of this name in any revision."""
        is_same = self.model.partition("@")[0] == name.partition("@")[0]
        return self.model_folder == folder.resolve() or (is_same and not Path(name).exists())


def is_worth_using(measured: Mapping[str, Any]) -> bool:
    """Whether "speed_up" and "text_speed_up" of a run's figures are enough: it must beat prompt
    lookup too."""
    return float(measured["speed_up"]) >= PAYS * max(1.0, float(measured["text_speed_up"]))


def read_adapt_runs() -> list[StoredRun]:
    """Every run with a readable plan, the last changed first."""
    found = []
    for path in adapters_home().glob(f"*/{PLAN_FILE}"):
        with suppress(InputError, LookupError, TypeError, ValueError, AttributeError, OSError):
            figures = path.parent / TRAINED_FOLDER / FIGURES_FILE
            measured = read_json(figures, "the figures of an adapter") if figures.exists() else {}
            run = StoredRun(path.parent, read_json(path, "the plan of a run"), measured)

            # A run that lacks what every run needs is left out.
            _ = run.settings["weights"], run.model, run.model_folder, run.hours, run.pays
            found.append((run.changed, run))
    return [run for _, run in sorted(found, key=lambda one: one[0], reverse=True)]


@dataclass(frozen=True)
class FoundRuns:
    """Runs that belong to a model, the last changed first; some may have no adapter yet."""

    fitting: tuple[StoredRun, ...] = ()  # made from exactly these weights, without a LoRA
    # of the same folder or name, but made from other weights or by an earlier version
    outdated: tuple[StoredRun, ...] = ()
    tuned: tuple[StoredRun, ...] = ()  # made from exactly these weights with a LoRA on them

    @property
    def chosen(self) -> StoredRun | None:
        """The newest run whose adapter drafts by default, if any."""
        return next((one for one in self.fitting if one.has_adapter and one.pays), None)


def find_runs_by_weights(
    model_folder: Path | None,  # None: the model was made in memory, no run belongs to it
    model_name: str,
) -> FoundRuns:
    """The runs that belong to a model. All bytes of the weights are read if a run is of weights of
    the same names, types and shapes."""
    every = read_adapt_runs() if model_folder is not None else []
    if model_folder is None or not every:
        return FoundRuns()
    try:
        shapes = stored_shapes_digest(model_folder)
        like = [run for run in every if str(run.settings["weights"]).startswith(shapes)]
        digest = stored_weights_digest(model_folder) if like else None
    except (InputError, OSError) as error:  # the model's own loader says what is wrong
        _log.debug("not looking for an adapter: %s", error)
        return FoundRuns()
    same = [run for run in like if run.settings["weights"] == digest]
    others = [run for run in every if run not in same and run.is_called(model_name, model_folder)]
    return FoundRuns(
        tuple(run for run in same if run.is_for_base),
        tuple(run for run in others if run.is_for_base),
        tuple(run for run in same if not run.is_for_base),
    )


def log_outdated(found: FoundRuns, model_name: str) -> None:
    """Log which outdated adapter is not used, and the option that uses it all the same."""
    outdated = [run for run in found.outdated if run.has_adapter]
    if outdated and found.chosen is None:
        _log.info(
            "the adapter %s was %s, so it is not used for %s; use it anyway with --adapter %s",
            outdated[0].name, outdated[0].why_outdated, model_name, outdated[0].name,
        )  # fmt: skip
