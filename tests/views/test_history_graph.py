from amem_cli.views.history_graph import Node, draw


def drawn(*states: str) -> list[str]:
    """Lines of the graph of `LANE STATE PARENT` texts, the newest first."""
    nodes = [Node(state, lane, None if parent == "-" else parent) for lane, state, parent in map(str.split, states)]
    return [f"{line} {node.id}" if node else line for line, node in draw(nodes)]


def test_one_history_is_one_line() -> None:
    assert drawn("a a3 a2", "a a2 a1", "a a1 -") == ["* a3", "* a2", "* a1"]


def test_a_fork_leaves_the_line_of_its_origin() -> None:
    assert drawn("b b2 b1", "a a3 a2", "b b1 a2", "a a2 a1", "a a1 -") == [
        "  * b2",
        "* | a3",
        "| * b1",
        "|/",
        "* a2",
        "* a1",
    ]


def test_a_forked_head_is_older_than_its_fork() -> None:
    assert drawn("b b2 b1", "b b1 a1", "a a1 -") == ["  * b2", "| * b1", "|/", "* a1"]


def test_forks_side_by_side_and_a_line_crossed() -> None:
    assert drawn("b b2 b1", "c c1 a1", "b b1 a1", "a a1 -") == ["  * b2", "| | * c1", "|_|/", "| * b1", "|/", "* a1"]


def test_lanes_are_used_again() -> None:
    lines = drawn("c c1 a2", "a a2 a1", "b b1 a1", "a a1 -")
    assert lines == ["| * c1", "|/", "* a2", "| * b1", "|/", "* a1"]


def test_a_fork_of_what_is_gone_stands_alone() -> None:
    assert drawn("b b1 gone", "a a1 -") == ["* b1", "* a1"]
