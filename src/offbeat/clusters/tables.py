"""What every table of a cluster file has in common; TOML and CSV in, clear errors out.

Validators raise ValueError with a message that starts with the key's name ("from_s must be before
to_s, ..."); `validated` puts the file and the dotted path in front of it.
"""

import csv
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from offbeat.errors import ClusterError


def _distinct(workers: tuple[int, ...]) -> tuple[int, ...]:
    seen: set[int] = set()
    for worker in workers:
        if worker in seen:
            raise ValueError(f"names worker {worker} twice")
        seen.add(worker)
    return workers


# Strict, so that true is no number and "8" is no 8.
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Rank = Annotated[int, Field(strict=True, ge=0)]
Workers = Annotated[tuple[Rank, ...], Field(min_length=1), AfterValidator(_distinct)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
PositiveOrInf = Annotated[float, Field(strict=True, gt=0)]


_TOP_KEYS = ("name", "description", "workers", "speed")


class Table(BaseModel):
    """A table of a cluster file: immutable, and its unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for key in data:
                if key in known:
                    continue
                if key in _TOP_KEYS:
                    raise ValueError(
                        f"{key} is not a known key here; "
                        f"{key} belongs at the top of the file, before the first [table]"
                    )
                raise ValueError(f"{key} is not a known key{nearest(key, known)}")
        return data


def _with_kind(data: Any) -> Any:
    return {"kind": "", **data} if isinstance(data, dict) else data


# For tables told apart by their kind: pydantic lists the kinds for a wrong one, not for none.
kind_may_be_missing = BeforeValidator(_with_kind)


def nearest(word: object, known: Sequence[str]) -> str:
    """Say which known word was probably meant, and which there are."""
    close = get_close_matches(str(word), known, n=1)
    guess = f", did you mean {close[0]}?" if close else ""
    return f"{guess} (known: {', '.join(known)})"


Model = TypeVar("Model", bound=Table)


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML text, turning a syntax error into a ClusterError that gives the line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{source}: not valid TOML: {error}") from None


def validated(
    model: type[Model], data: dict[str, Any], source: str, folder: Path | None = None
) -> Model:
    """Build a model, turning what pydantic finds into a ClusterError of one line per problem."""
    try:
        return model.model_validate(data, context={"folder": folder} if folder else None)
    except ValidationError as error:
        problems = error.errors()
        lines = [_line(found, data) for found in problems if not _follows(found, problems)]
    if len(lines) == 1:
        raise ClusterError(f"{source}: {lines[0]}")
    shown = lines[:5] + ([f"and {len(lines) - 5} more"] if len(lines) > 5 else [])
    raise ClusterError("\n  ".join([f"{source}: {len(lines)} problems", *shown]))


_TYPE_WORDS = {
    "bool": "true or false",
    "dict": "a table",
    "float": "a number",
    "int": "a whole number",
    "model": "a table",
    "string": "a text in quotes",
    "tuple": "a list",
}


def _follows(problem: ErrorDetails, problems: list[ErrorDetails]) -> bool:
    """Say whether a problem is only a consequence of another one, such as a list cut short."""
    if problem["type"] == "default_factory_not_called":
        return True
    here = problem["loc"]
    inside = (other["loc"] for other in problems if other is not problem)
    return problem["type"] == "too_short" and any(loc[: len(here)] == here for loc in inside)


def _line(problem: ErrorDetails, data: dict[str, Any]) -> str:
    """Put one of pydantic's problems into our words."""
    path = _path(problem["loc"], data)
    limits = problem.get("ctx", {})
    got = f"got {_shown(problem['input'])}"
    match problem["type"]:
        case "value_error":
            message = str(limits["error"])
            joint = " " if message.startswith(("names ", "must ")) else "."
            return f"{path}{joint}{message}" if path else message
        case "missing":
            return f"{path} is missing"
        case "greater_than":
            return f"{path} must be more than {limits['gt']:g}, {got}"
        case "greater_than_equal":
            return f"{path} must be at least {limits['ge']:g}, {got}"
        case "less_than_equal":
            return f"{path} must be at most {limits['le']:.10g}, {got}"
        case "finite_number":
            return f"{path} must be a finite number, {got}"
        case "too_short":
            return f"{path} must have at least {_values(limits['min_length'])}, {got}"
        case "too_long":
            return f"{path} must have at most {_values(limits['max_length'])}, {got}"
        case "union_tag_invalid":
            kinds = str(limits["expected_tags"]).replace("'", "").split(", ")
            what = repr(limits["tag"]) if limits["tag"] else "missing"
            return f"{path}.kind is {what}{nearest(limits['tag'], kinds)}"
        case "tuple_type" if isinstance(problem["input"], dict):
            return f"{path} must be a list, {got} (write [[{path}]], with two brackets)"
        case "literal_error":
            return f"{path} must be {limits['expected']}, {got}"
        case kind if (word := kind.removesuffix("_type").split("_")[0]) in _TYPE_WORDS:
            return f"{path} must be {_TYPE_WORDS[word]}, {got}"
        case _:
            return f"{path}: {problem['msg']}, {got}"


def _path(location: tuple[int | str, ...], data: Any) -> str:
    """Write where a problem is as in `noise[1].sigma`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            data = data[part] if isinstance(data, list | tuple) else None
        elif isinstance(data, dict) and (part in data or data.get("kind") != part):
            path += f".{part}" if path else part
            data = data.get(part)
        # else the part is the name pydantic gives to a branch of a union, not a key
    return path


def _values(count: int) -> str:
    return f"{count} value" if count == 1 else f"{count} values"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def folder_of(info: ValidationInfo) -> Path:
    """Say where a relative path starts: at the cluster file, or where we are if there is none."""
    return info.context["folder"] if info.context else Path()


def read_csv(key: str, path: object, folder: Path) -> tuple[list[str] | None, list[list[float]]]:
    """Read a CSV file of positive numbers as (header or None, rows).

    Blank lines and lines that start with # are skipped; a first line without any number is the
    header.
    """
    if not isinstance(path, str):
        raise ValueError(f"{key} must be a text in quotes, got {_shown(path)}")
    try:
        text = (folder / path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{key} {path!r} cannot be read ({_reason(error)}); "
            f"a relative path starts at the cluster file, in {str(folder)!r}"
        ) from None
    header: list[str] | None = None
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        values = [_number(cell) for cell in cells]
        if not rows and header is None and all(value is None for value in values):
            header = cells
            continue
        row = [value for value in values if value is not None]
        if len(row) < len(values):
            bad = cells[values.index(None)]
            raise ValueError(f"{key} {path!r}, line {number}: {bad!r} is not a number")
        rows.append(row)
        where = f"{key} {path!r}, line {number}"
        if len(row) != len(rows[0]):
            raise ValueError(f"{where}: {_values(len(row))}, but {len(rows[0])} in the first row")
        for value in row:
            if not (value > 0 and isfinite(value)):
                raise ValueError(f"{where}: values must be more than 0 and finite, got {value}")
    if not rows:
        raise ValueError(f"{key} {path!r} holds no rows")
    return header, rows


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "not UTF-8 text"


def read_text(path: Path) -> str:
    """Read a cluster file, turning what the system says into a ClusterError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path}: cannot be read ({_reason(error)})") from None
