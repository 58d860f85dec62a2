"""Draws histories as text, like `git log --graph`: one lane per agent, newest state first."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One state: its agent, and the state before it, possibly of another agent."""

    id: str
    lane: str
    parent: str | None


@dataclass
class _Lane:
    """The line of an agent: its first and last row from the top, its column, and the lane that it forked from."""

    first: int
    last: int
    parent: str | None = None
    column: int = 0


def draw(nodes: Sequence[Node]) -> list[tuple[str, Node | None]]:
    """The lines of the graph from the top, each with its node; None for a line between two nodes."""
    lanes = _lanes(nodes)
    lines: list[tuple[str, Node | None]] = []
    for row, node in enumerate(nodes):
        lane = lanes[node.lane]
        passing = {other.column: "|" for other in lanes.values() if other.first <= row <= other.last}
        lines.append((_line({**passing, lane.column: "*"}), node))
        if lane.parent and lane.last == row:
            passing = {other.column: "|" for other in lanes.values() if other.first <= row < other.last}
            lines.append((_joint(passing, lanes[lane.parent].column, lane.column), None))
    return lines


def _lanes(nodes: Sequence[Node]) -> dict[str, _Lane]:
    lane_of = {node.id: node.lane for node in nodes}
    lanes: dict[str, _Lane] = {}
    for row, node in enumerate(nodes):
        lane = lanes.setdefault(node.lane, _Lane(row, row))
        lane.last = row
        source = lane_of.get(node.parent) if node.parent else None
        lane.parent = source if source != node.lane else None
    for lane in lanes.values():
        if lane.parent:  # the forked state is older than the fork, so its lane starts there
            origin = lanes[lane.parent]
            origin.first = min(origin.first, lane.last)
    placed: list[_Lane] = []
    for lane in sorted(lanes.values(), key=lambda lane: _depth(lanes, lane)):
        lane.column = lanes[lane.parent].column + 1 if lane.parent else 0
        while any(other.column == lane.column and _overlap(other, lane) for other in placed):
            lane.column += 1
        placed.append(lane)
    return lanes


def _depth(lanes: dict[str, _Lane], lane: _Lane) -> int:
    return 1 + _depth(lanes, lanes[lane.parent]) if lane.parent else 0


def _overlap(a: _Lane, b: _Lane) -> bool:
    return a.first <= b.last and b.first <= a.last


def _line(columns: dict[int, str]) -> str:
    """The marks at their columns, two characters apart."""
    return " ".join(columns.get(column, " ") for column in range(max(columns) + 1))


def _joint(passing: dict[int, str], left: int, right: int) -> str:
    """The line that joins the end of the lane at column `right` to its origin at column `left`."""
    text = list(_line({**passing, right: " "}))
    for place in range(2 * left + 1, 2 * right):
        if text[place] == " ":
            text[place] = "/" if place == 2 * right - 1 else "_"
    return "".join(text).rstrip()
