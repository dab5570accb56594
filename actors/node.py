"""A machine of the cluster, and how a job says which machines it means. Knows nothing of Ray but its labels' syntax."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.errors import ConfigError

ACCELERATOR_LABEL = "ray.io/accelerator-type"
CONDITION = re.compile(r"(?P<unlike>!?)(?:in\((?P<several>[^()]*)\)|(?P<one>[^!()]*))")


@dataclass(frozen=True, slots=True)
class Node:
    """What a machine offers in all, whether it is in use or not."""

    name: str  # for people; unique
    cpus: int
    gpus: int = 0
    accelerators: frozenset[str] = frozenset()  # as Ray names them: H100, L4, …
    labels: Mapping[str, str] = field(default_factory=dict)
    head: bool = False
    id: str = ""  # Ray's

    def describe(self) -> str:
        """In a few words, for people."""
        cores = "1 core" if self.cpus == 1 else f"{self.cpus} cores"
        return f"{cores}, {self.gpus} {'/'.join(sorted(self.accelerators)) or 'GPU'}" if self.gpus else cores


@dataclass(frozen=True, slots=True)
class Choice:
    """Which nodes a worker may be put on: those of one accelerator type, those with certain labels, or any."""

    accelerator: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def allows(self, node: Node) -> bool:
        """Labels as in Ray's label selectors: `value`, `!value`, `in(a,b)`, `!in(a,b)`."""
        if self.accelerator is not None and self.accelerator not in node.accelerators:
            return False
        return all(_holds(value, node.labels.get(key)) for key, value in self.labels.items())

    @property
    def kind(self) -> str:
        """What its GPUs are called."""
        return self.accelerator or self.labels.get(ACCELERATOR_LABEL) or "GPU"

    def together_with(self, other: Choice) -> Choice:
        """Nodes that both allow."""
        return Choice(self.accelerator or other.accelerator, {**other.labels, **self.labels})

    def check(self, section: str) -> None:
        """ConfigError where a label's condition cannot be read; `section` is target or draft."""
        for key, value in self.labels.items():
            if CONDITION.fullmatch(value) is None:
                raise ConfigError(
                    f"{section}.label_selector: {key}: {value!r} is no condition; "
                    "write value, !value, in(a,b) or !in(a,b)"
                )

    def refusal(self, section: str, nodes: Sequence[Node]) -> ConfigError:
        """That no node is allowed."""
        if self.accelerator is not None:
            there = sorted({name for node in nodes for name in node.accelerators})
            known = f"the cluster has {', '.join(there)}" if there else "the nodes name no accelerator type"
            return ConfigError(f"{section}.accelerator: no node has {self.accelerator}; {known}")
        asked = ", ".join(f"{key}: {value}" for key, value in self.labels.items())
        there = sorted({f"{key}: {node.labels[key]}" for node in nodes for key in self.labels if key in node.labels})
        known = f"there are nodes with {', '.join(there)}" if there else "no node has a label of that name"
        return ConfigError(f"{section}.label_selector: no node has {asked}; {known}")


def _holds(condition: str, value: str | None) -> bool:
    """A node without the label is unlike any value."""
    match = CONDITION.fullmatch(condition)
    assert match is not None, f"{condition!r}: check() comes first"
    wanted = [match["one"]] if match["several"] is None else [one.strip() for one in match["several"].split(",")]
    return (value in wanted) != bool(match["unlike"])
