"""The file that a campaign is: which races, in which order.

    algorithms = ["sync", "eager", "abs", "local"]
    clusters = ["mixed-4", "two-slow-of-eight"]
    tasks = ["noisy"]
    seeds = 5

Every cluster with every task is a race. Where not all of them tell anything, they are named one by
one, instead or besides, each with what differs:

    [[race]]
    clusters = ["text-8"]
    tasks = ["text-adamw"]
    algorithms = ["sync", "eager"]
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbeat.clusters import named as named_clusters
from offbeat.lab.race import Race
from offbeat.lab.tuning import TRIALS
from offbeat.report.spread import ENOUGH_SEEDS

Names = list[str]


class Some(BaseModel):
    """One `[[race]]`: each of its clusters with each of its tasks; the rest as in all others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    clusters: Names = Field(min_length=1)
    tasks: Names = Field(min_length=1)
    algorithms: Names | None = Field(default=None, min_length=1)
    rates: str | None = None
    until: str | None = None
    target: str | None = None


class Settings(BaseModel):
    """The file: what is to be raced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    algorithms: Names = Field(min_length=1)
    clusters: Names = Field(default_factory=list)
    """By name, or files: beside this one, if they are not found from here."""
    tasks: Names = Field(default_factory=list)
    seeds: int = ENOUGH_SEEDS
    first_seed: int = 0
    rates: str = "1,2,4"
    trials: int = TRIALS
    until: str | None = None
    target: str | None = None
    """Of all tasks, instead of their own."""
    some: list[Some] = Field(default_factory=list, alias="race")
    folder: Path = Field(default=Path(), exclude=True)

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read a file; ValueError says what is wrong with it."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls.model_validate({**content, "folder": path.parent})
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not TOML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            key, words = ".".join(map(str, first["loc"])), first["msg"]
            if first["type"] == "extra_forbidden":
                fields = (cls if len(first["loc"]) == 1 else Some).model_fields.items()
                known = [field.alias or name for name, field in fields if not field.exclude]
                words = f"not a known key (known: {', '.join(known)})"
            raise ValueError(f'{path}, key "{key}": {words}') from None

    def races(self, command: str = "") -> list[Race]:
        """Make them, in order; ValueError for what cannot be meant."""
        found = [_race(cell, command) for cell in self._cells()]
        if not found:
            raise ValueError("a campaign needs clusters and tasks, or [[race]] tables with both")
        names = [f"{race.task_name} on {race.cluster.name}" for race in found]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ValueError(f"{twice[0]} is named twice")
        return found

    def places(self) -> list[tuple[str, str, int]]:
        """Of each race its task, its cluster's name, and how many algorithms: nothing is loaded."""
        return [
            (each["task"], Path(each["cluster"]).stem, len(each["algorithms"]))
            for each in self._cells()
        ]

    def _cells(self) -> list[dict[str, Any]]:
        """What each race is made from."""
        shared = self.model_dump(exclude={"clusters", "tasks", "some"})
        parts = [{"clusters": self.clusters, "tasks": self.tasks}]
        parts += [each.model_dump(exclude_none=True) for each in self.some]
        found = []
        for part in parts:
            merged = shared | part
            clusters, tasks = merged.pop("clusters"), merged.pop("tasks")
            found += [
                merged | {"cluster": self._place(cluster), "task": task}
                for cluster in clusters
                for task in tasks
            ]
        return found

    def _place(self, cluster: str) -> str:
        beside = self.folder / cluster
        is_beside = cluster not in named_clusters() and not Path(cluster).exists()
        return str(beside) if is_beside and beside.exists() else cluster


def _race(cell: dict[str, Any], command: str) -> Race:
    """One of them; an error names it, as there may be many."""
    try:
        return Race.of(**cell, command=command)
    except ValueError as error:
        raise ValueError(f"{cell['task']} on {cell['cluster']}: {error}") from None


def mark(settings: Settings, races: list[Race]) -> str:
    """Tells one campaign from another: by its settings, and by what files of clusters say."""
    said = [settings.model_dump_json(), *(race.cluster_file for race in races)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
