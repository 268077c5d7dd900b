"""Numbered entries that any rank adds to a list in the store, and that every reader takes in order, each once.

An entry is counted first and written then: two writers never get one number, and readers look at one counter. A writer
that is killed between the two leaves a number that never gets its entry; readers go on past it at once, and soon look
for it rarely: a writer that was only stopped may come back.
"""

from __future__ import annotations

import time

from ncclguard.agreement.store import AgreementStore

#: Seconds for which an entry that was counted but not yet written is looked for each
#: time; from then on once in so many seconds.
ENTRY_PATIENCE = 10.0


class Entries:
    """One list, under the key `counter` and the keys ``<entry>/<number>``; a reader of
    its own for each object, and each thread.
    """

    def __init__(self, counter: str, entry: str) -> None:
        self._counter = counter
        self._entry = entry
        self._counted = 0
        self._awaited: dict[int, float] = {}  # numbers without an entry yet, and since when they are known
        self._next_rare = 0.0

    def add(self, store: AgreementStore, text: str) -> int:
        """Append an entry; returns its number, from 1."""
        number = store.count(self._counter, 1)
        store.first(f"{self._entry}/{number}", text)
        return number

    def count(self, store: AgreementStore) -> int:
        """How many there are, those included whose writer has not come to write them."""
        return store.count(self._counter)

    def new(self, store: AgreementStore) -> list[str]:
        """Those that were written since the last call, in order of their numbers."""
        now, count = time.monotonic(), self.count(store)
        self._awaited.update(dict.fromkeys(range(self._counted + 1, count + 1), now))
        self._counted = max(self._counted, count)
        rare = now >= self._next_rare
        if rare:
            self._next_rare = now + ENTRY_PATIENCE
        due = [number for number, since in self._awaited.items() if rare or now - since <= ENTRY_PATIENCE]
        found = store.read_many([f"{self._entry}/{number}" for number in due]) if due else {}
        texts = [(number, found.get(f"{self._entry}/{number}")) for number in due]
        for number, text in texts:
            if text is not None:
                del self._awaited[number]
        return [text for _, text in texts if text is not None]
