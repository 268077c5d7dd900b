"""Read flight-recorder dumps, pickled or JSON, of torch 2.3 to 2.13, without trusting them.

A dump comes from another machine, so it is read by an unpickler that refuses every global: only lists, dicts, strings
and numbers can come out of it.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ncclguard.explain.reader import Source, UnusableInput, read_all

DUMP_LIMIT = 1 << 30


class _Plain(pickle.Unpickler):
    """An unpickler for plain data only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"refused: the dump asks for {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("refused: the dump asks for a persistent object")


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded operation; `seq` counts within the group, `pending` is true unless it completed.

    `unsure`: gloo retires an operation both when it completes and when it times out, and notes neither.
    """

    group: str
    seq: int
    op: str
    state: str
    pending: bool
    unsure: bool
    p2p: bool
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    created_ns: int
    timeout_ms: int | None
    frames: tuple[str, ...]


@dataclass(slots=True)
class Dump:
    """One rank's dump: the groups it knows (name -> members), its operations in order, its counters per group."""

    rank: int
    file: str
    version: str
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    status: dict[str, dict[str, int]] = field(default_factory=dict)


def load_plain(data: bytes) -> Any:
    """Unpickle bytes that hold nothing but plain data.

    Raises:
        UnusableInput: the bytes ask for a class or function, or are damaged.
    """
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:
        raise UnusableInput(f"not a readable flight-recorder pickle ({type(error).__name__}: {error})") from error


def _int(value: object, default: int = -1) -> int:
    if isinstance(value, (int, float)):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return default


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(
        tuple(_int(part, 0) for part in row) if isinstance(row, (list, tuple)) else (_int(row, 0),) for row in value
    )


def _frames(value: object) -> tuple[str, ...]:
    """Return "file:line in function" of a recorded Python stack, outermost first (torch records innermost first)."""
    rows = value if isinstance(value, (list, tuple)) else ()
    found = [
        f"{row.get('filename')}:{row.get('line')} in {row.get('name')}" for row in rows if isinstance(row, Mapping)
    ]
    return tuple(reversed(found[:16]))


def _entry(raw: Mapping[str, Any]) -> Entry:
    group = raw.get("process_group") or ("", "")
    p2p = bool(raw.get("is_p2p"))
    state = str(raw.get("state", ""))
    limit = _int(raw.get("timeout_ms"), 0)
    name = str(raw.get("profiling_name", ""))
    open_ended = state != "completed" and raw.get("time_discovered_completed_ns") is None
    unsure = open_ended and bool(raw.get("retired")) and name.startswith("gloo:")
    return Entry(
        group=str(group[0]) if isinstance(group, (list, tuple)) and group else str(raw.get("pg_id", "")),
        seq=_int(raw.get("p2p_seq_id" if p2p else "collective_seq_id", raw.get("seq_id"))),
        op=name.split(":", 1)[-1],
        state=state,
        pending=open_ended and not unsure,
        unsure=unsure,
        p2p=p2p,
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        dtypes=tuple(str(part) for part in raw.get("input_dtypes") or ()),
        created_ns=_int(raw.get("time_created_ns"), 0),
        timeout_ms=limit or None,
        frames=_frames(raw.get("frames")),
    )


def dump_from(data: object, rank: int, file: str) -> Dump:
    """Build a dump out of plain data; names of groups are taken leniently (gloo in torch 2.13 leaves them empty)."""
    if not isinstance(data, Mapping) or not ("entries" in data or "pg_config" in data or "pg_status" in data):
        raise UnusableInput(f"{file}: not a flight-recorder dump")
    dump = Dump(rank, file, str(data.get("version", "")))
    config = data.get("pg_config")
    for key, raw in config.items() if isinstance(config, Mapping) else ():
        if isinstance(raw, Mapping):
            name = str(raw.get("name") or key)
            dump.groups[name] = tuple(int(part) for part in re.findall(r"\d+", str(raw.get("ranks", ""))))
            dump.descriptions[name] = str(raw.get("desc", ""))
    entries = data.get("entries")
    for raw in entries if isinstance(entries, (list, tuple)) else ():
        if isinstance(raw, Mapping):
            dump.entries.append(_entry(raw))
    status = data.get("pg_status")
    for key, raw in status.items() if isinstance(status, Mapping) else ():
        if isinstance(raw, Mapping):
            dump.status[str(key)] = {str(name): _int(value) for name, value in raw.items()}
    named = {entry.group for entry in dump.entries}
    if "" in dump.groups and len(dump.groups) == 1 and len(named) == 1:  # torch 2.13 on gloo
        dump.groups[next(iter(named))] = dump.groups.pop("")
    return dump


def read_dump(source: Source) -> Dump:
    """Read one dump file; its rank is the number its name ends in.

    Raises:
        UnusableInput: the file is damaged, no dump, asks for a class, or its name holds no rank.
    """
    data = read_all(source, DUMP_LIMIT)
    try:
        plain = load_plain(data) if source.kind == "pickle" else json.loads(data)
    except UnusableInput as error:
        raise UnusableInput(f"{source.name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableInput(f"{source.name}: not readable as JSON ({error})") from error
    if isinstance(plain, Mapping) and source.rank is None:
        raise UnusableInput(f"{source.name}: its name does not end in a rank, so it is not known whose dump it is")
    return dump_from(plain, source.rank if source.rank is not None else -1, source.name)
