"""Which methods are compared: by name, with settings, from the command line.

    fedcbdr,uniform    fedcbdr:balance=adjusted,scores=svd,joint

A part with `=` and without `:` is a setting of the method before it. Names are those of the methods
in `offbeat.federated`, settings the fields of their dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from offbeat import federated as fed
from offbeat.lab.settings import nearest, parsed

DEFAULT = "finetune,lwf,importance,uniform,fedcbdr,fedcbdr:balance=adjusted,joint"


def known() -> dict[str, type[fed.Method]]:
    """Every method by its name."""
    public = [getattr(fed, name) for name in fed.__all__]
    found = [each for each in public if isinstance(each, type) and issubclass(each, fed.Method)]
    return {each.name: each for each in found}


@dataclass(frozen=True)
class Entrant:
    """A method, and what the command line calls it."""

    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What was given; the rest is as the method has it."""

    @property
    def name(self) -> str:
        return self.label.partition(":")[0]

    def method(self, budget: int) -> fed.Method:
        """Make one client's method; it keeps so many samples of a task, if it keeps any."""
        kind = known()[self.name]
        has_budget = is_dataclass(kind) and "budget" in [each.name for each in fields(kind)]
        return kind(**({"budget": budget} if has_budget else {}) | self.settings)


def parse(texts: Sequence[str], budget: int) -> list[Entrant]:
    """Read names with settings; ValueError with the nearest match for what does not exist."""
    found = [_parsed(spec, budget) for text in texts or (DEFAULT,) for spec in _specs(text)]
    for number, each in enumerate(found):
        if each.label in [other.label for other in found[:number]]:
            raise ValueError(f"{each.label} is named twice")
    return found


def _specs(text: str) -> list[str]:
    specs: list[str] = []
    for part in text.split(","):
        if specs and "=" in part and ":" not in part:
            specs[-1] += ("," if ":" in specs[-1] else ":") + part
        else:
            specs.append(part.strip())
    return specs


def _parsed(spec: str, budget: int) -> Entrant:
    name, _, rest = spec.partition(":")
    methods = known()
    if name not in methods:
        raise ValueError(
            f"no method is called {name!r}{nearest(name, [*methods])}\n"
            f"There are {', '.join(methods)}"
        )
    entrant = Entrant(spec, parsed(spec, methods[name], rest))
    try:
        entrant.method(budget)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec}: {error}") from None
    return entrant
