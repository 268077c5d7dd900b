"""Keys that say who was first at the furthest place so far, overwritten in place: a
job of millions of collectives needs few of them.
"""

from __future__ import annotations

import json

from ncclguard.agreement.store import AgreementStore

#: Characters of a single text in an entry.
TEXT = 400

Place = tuple[int, ...]


class Furthest:
    """This process's view of such keys. Places are compared like tuples and only grow:
    generation, then number, then level.
    """

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}  # key -> what was there last

    def enter(self, store: AgreementStore, key: str, place: Place, entry: list[int | str]) -> list[int | str] | None:
        """Write `entry` for a place that nobody has come to; return the entry of its first,
        None when others are further.
        """
        mine = json.dumps([place, *(item[:TEXT] if isinstance(item, str) else item for item in entry)])
        expected = self._seen.get(key, "")
        while True:
            found = self._seen[key] = store.replace(key, expected, mine)
            at, *said = json.loads(found)
            if tuple(at) >= place:
                return said if tuple(at) == place else None
            if found == expected:
                return None  # the store has lost it
            expected = found
