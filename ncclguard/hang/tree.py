"""Stacks of many ranks as one tree: what all have in common stands once, and a branch says which ranks took it.

After the prefix trees of STAT (Arnold et al., "Stack Trace Analysis for Large Scale Debugging", IPDPS 2007): of
thousands of ranks the branch of few is the one to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ncclguard.hang.names import names_of
from ncclguard.hang.stacks import programs_line
from ncclguard_explain.language import joined, say, tr


@dataclass
class Node:
    """Calls that the same ranks have made one in another, and the calls in which they differ then."""

    frames: list[str]
    ranks: list[int]
    branches: list[Node] = field(default_factory=list)


def groups_of(stacks: Mapping[int, Sequence[str]]) -> list[tuple[list[int], tuple[str, ...]]]:
    """Return the ranks that have one stack, and that stack; the largest group first.

    >>> groups_of({0: ["a", "b"], 1: ["a", "c"], 2: ["a", "b"]})
    [([0, 2], ('a', 'b')), ([1], ('a', 'c'))]
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(tuple(stack), []).append(rank)
    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=lambda group: (-len(group[0]), group[0]))


def merge(groups: Sequence[tuple[list[int], tuple[str, ...]]]) -> list[Node]:
    """Return the stacks as a tree, in the order of the groups."""
    roots: list[Node] = []
    open_ones = [(list(groups), 0, roots)]  # groups that agree up to a depth, and where their branches belong
    while open_ones:
        same, depth, nodes = open_ones.pop()
        branches: dict[str, list[tuple[list[int], tuple[str, ...]]]] = {}
        for ranks, stack in same:
            if len(stack) > depth:
                branches.setdefault(stack[depth], []).append((ranks, stack))
            else:  # others have gone on from here
                nodes.append(Node([], ranks))
        for inside in branches.values():
            ends = depth + _in_common([stack for _, stack in inside], depth)
            node = Node(list(inside[0][1][depth:ends]), sorted(rank for ranks, _ in inside for rank in ranks))
            nodes.append(node)
            if len(inside) > 1:
                open_ones.append((inside, ends, node.branches))
    return roots


def _in_common(stacks: Sequence[tuple[str, ...]], begin: int) -> int:
    """Return how many calls all of some stacks share from a depth on."""
    shortest, *others = sorted(stacks, key=len)
    for at in range(begin, len(shortest)):
        if any(stack[at] != shortest[at] for stack in others):
            return at - begin
    return len(shortest) - begin


def lines_of(nodes: Sequence[Node], notes: Mapping[int, str], shown: int = 3) -> Iterator[str]:
    """Return the tree for people: of calls without a branch the innermost ones, and the program's own innermost.

    `notes` say what ranks stand in.

    >>> list(lines_of(merge(groups_of({0: ["a", "b"], 1: ["a", "c"], 2: ["a", "b"]})), {1: "asleep"}))
    ['ranks 0-2: a', '  ranks 0, 2: b', '  rank 1: c (asleep)']
    >>> list(lines_of(merge(groups_of({0: ["a", "b"], 1: ["a"]})), {}))
    ['ranks 0-1: a', '  rank 1: here', '  rank 0: b']
    """
    left = [(node, "") for node in reversed(nodes)]
    while left:
        node, indent = left.pop()
        first = indent == "" and len(node.frames) > shown + 1
        frames = _shown(node.frames, len(node.frames) - shown, first)
        ended = {notes[rank] for rank in node.ranks if rank in notes} if not node.branches else set()
        stands = {"ranks": names_of(node.ranks), "text": " -> ".join(frames) or tr("here")}
        line = tr("{ranks}: {text}", **stands)
        if ended:
            line = tr("{ranks}: {text} ({details})", **stands, details=joined("; ", sorted(ended)))
        yield f"{indent}{say(line)}"
        left += [(branch, indent + "  ") for branch in reversed(node.branches)]


def _shown(frames: Sequence[str], begin: int, first: bool) -> list[str]:
    """Return the frames from a number on, before them the program's own innermost, and the `first` one where wanted."""
    begin = max(begin, 0)
    chosen = {0} if first else set()
    own = programs_line(frames)
    if own is not None and own < begin:
        chosen.add(own)
    found: list[str] = []
    for number in sorted(chosen):
        found += [frames[number], "..."] if number + 1 not in (*chosen, begin) else [frames[number]]
    return [*found, *frames[begin:]]
