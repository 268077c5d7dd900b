"""Read what no single row of the table can: tracebacks, stacks, summaries, RAS reports, JSON documents, progress bars.

`read` takes the record that opens a message of many lines, and the raw lines after it. It follows only lines that can
belong to it, those with the same prefix where there is one, since the lines of several ranks interleave.
`read_document` takes plain JSON data, `read_progress` a line that says what a rank was doing. What they do not know
they leave alone.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ncclguard_explain import incident_text
from ncclguard_explain.facts import Fact, Kind, Work
from ncclguard_explain.patterns import numbers, parse_text, warning_class
from ncclguard_explain.quotations import Following
from ncclguard_explain.records import Prefix, headless, message_of, split_prefix

_EXCEPTION = re.compile(
    r"^(?!(?:NOTE|INFO|DEBUG|WARN|WARNING|ERROR|CRITICAL|FATAL)\b)(?P<type>(?:[a-zA-Z_]\w*\.)*[A-Z]\w*)(?:: ?(?P<text>.*))?$"
)
# vLLM's and SGLang's loggers, which head every line of a traceback.
_LOGGER = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\d\-]+ [\d:.,]+ \[[^\]]{1,80}\] ?")
_OF_RANK = re.compile(r"\(most recent call last\): \(RANK (\d+)\)")  # torch/distributed/checkpoint/api.py
_HYDRA = re.compile(r"RANK (\d+) PID (\d+) RUNNING AT (\S+)")  # MPICH hydra 3.0 to 4.2, Intel MPI
_ON_RANK = re.compile(r"(?:\bon rank |^\[Rank:(?=\d+\] FATAL ERROR))(\d{1,6})\b(?! (?:failed|died|timed))")
#: What faulthandler says of a signal that nobody sends to a process, before it prints the stack, and the signal.
_CRASHES = {
    f"Fatal Python error: {words}": -number
    for words, number in {"Segmentation fault": 11, "Bus error": 7, "Floating": 8, "Illegal instruction": 4}.items()
}
#: A traceback that Ray hands on: the process in which it was raised.
_RAY_TASK = re.compile(r"ray\.exceptions\.RayTaskError\(.*?\(pid=(\d{1,9}), ip=([\d.]+)[,)]")
_THROWN = re.compile(r"terminate called after throwing an instance of '([\w:]+)'")
_KILLED_BY = re.compile(r"KILLED BY SIGNAL: (\d+)")
# Open MPI's mpirun, 1.6 to 4.1, and horovodrun, which says the code before
_PROCESS_NAME = re.compile(r"^\s*Process name: (?:\[\[\d+,\d+\],)?(\d{1,6})\]?\s*$")
_EXIT_CODE = re.compile(r"Exit code: +(\d+)")
_MAIN_THREAD = re.compile(r'Thread (\d+) \([\w+]+\): "MainThread"')
_OF_ACTOR = re.compile(r"\brepr=\w+\[rank=(\d+)\]")  # Ray (python/ray/exceptions.py), actors of NeMo-RL and others
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_PYSPY = re.compile(r"^\s+(\S+) \(([^()]+):(\d+)\)$")
#: What heads a table of one value for each rank, in which all should be the same, and its entries.
_TABLE_HEAD = re.compile(
    r"(?i:\b(?:crc(?:32)?|check ?sums?|hash(?:es)?|digests?|sha(?:1|256)|md5|fingerprints?)\b|mismatch|\bdiffer|inconsisten|not (?:the same|equal|identical))"
)
_TABLE_ENTRY = re.compile(
    r"(?:(?:rank|process|proc|replica|worker|device)[ _#]?|(?<![\w.:\-/\[])|(?<![\w\]])\[(?=\d+\]))(\d{1,5})\]?(?: ?[:=] ?| ?-> ?)['\"]?((?:torch\.Size\()?\[[\d, ]*\]|\([\d, ]+\)|(?:0x)?[0-9a-f]{6,})(?![\w.:])",
    re.IGNORECASE,
)
_TABLE_SIDE = re.compile(
    r"((?:torch\.Size\()?\[[\d, ]*\]|\([\d, ]+\)|\b(?:0x)?[0-9a-f]{6,})\)?(?: ?[:=]| ?->| on)? (?:ranks?|replicas?|process(?:es)?|workers?):? \[?(\d[\d,\- ]*)",
    re.IGNORECASE,
)
_SUMMARY_RANK = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)")
_SUMMARY_EXIT = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_SUMMARY_TRACE = re.compile(r"traceback\s*: (.*)")
_SUMMARY_HOST = re.compile(r"host\s*: (\S+)")
_TABLE_ENDS = re.compile(r"\s*(?:\[\d+\]:|-{8,}|={8,})")
_DESYNC_AT = re.compile(r"\[(\d+)\] Timeout at collective: (\w+), #(\d+)")
_NEVER = re.compile(r"ranks \[([\d, ]+)\] are the lagging ranks that caused this timeout")
_UNFINISHED = re.compile(r"\[([\d, ]+)\] joined but didn't finish collective #(\d+)")
_NOT_JOINED = re.compile(r"\[([\d, ]+)\] finished collective #(\d+), but didn't join collective #(\d+)")
_STATE_HEAD = re.compile(r"#(\d+) (started|finished) ranks:")
_STATE = re.compile(r"\[([\d, ]+)\] (?:started|finished) (\w+)")
_CULPRIT = re.compile(
    r"Culprit rank (\d+); (?:Error type: )?(\w+)(?:[,;] (?:Expected ([^:']*): '(.*?)' does not match found [^:']*: "
    r"'(.*?)'|([^,]*)))?"
)
_FR_HEAD = re.compile(
    r"(?:Collective sequence number: |Not all ranks joining collective(?:[,:] sequence number:)? )(\d+)"
)
_FR_NAME = re.compile(r"(?<!joining )collective: (?:nccl2?:|gloo:)?(\w+)")
_FR_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")
#: The recorder's names of operations that the other lines of torch write in another way.
_FR_OPS = {"all_reduce": "ALLREDUCE", "all_gather": "ALLGATHER", "_all_gather_base": "_ALLGATHER_BASE", "all_to_all": "ALLTOALL",
           "all_to_allv": "ALLTOALL_BASE"}  # fmt: skip
#: The table of torchfrtrace -j has a column for each rank.
_FR_CELL = re.compile(r"(\w+)\((?:[^()]*?\b(?:collective_)?seq(?:_id)?=(\d+))?[^()]*?state=(\w+)\)")
_FR_EXPECTED = re.compile(r"expected ranks: \{([\d, ]+)\}")


#: Kubernetes 1.20 to 1.34: why a container waits that has never run (`kubectl describe pod`).
_NOT_STARTED = re.compile(
    r"Reason: +(?:(?:Err|Inspect|Init:)?Image\w+|ErrImage\w+|InvalidImageName|CreateContainer\w*Error|ContainerCreating|RunContainerError)\s*$"
)


def read(text: str, prefix: Prefix, following: Following, make: Fact) -> tuple[list[Fact], bool]:
    """Return the facts of the message that a record opens, and whether it was one: then no row need be tried on it."""
    if incident_text.HEAD in text and (incident := incident_text.read(text, following, make)) is not None:
        return [incident], True
    if text.startswith("frame #"):  # of C++, in which classes of errors are names of functions
        return [], True
    if "Traceback (most" in text:
        fact = _traceback(text, prefix, following, make)
        return ([fact] if fact is not None else []), True
    if "MainThread stack:" in text:  # TensorRT-LLM's, outermost frame first
        own = re.search(r"\[RANK (\d+)\]", text)
        fact = _stack(following, make.clone(rank=int(own[1]), rank_basis="text") if own else make, inner=False)
        return ([fact] if fact is not None else []), False
    if "most recent call first" in text or "Fatal Python error" in text or '"MainThread"' in text:
        if "Exception raised from" in text:
            return [], True
        thread = _MAIN_THREAD.search(text)  # its number is that of the process
        fact = _stack(following, make.clone(pid=int(thread[1])) if thread else make)
        crashed = [
            make.clone(kind=Kind.LAUNCHER, name="event", number=number)
            for words, number in _CRASHES.items()
            if words in text
        ]
        return [*([fact] if fact is not None else []), *crashed], fact is not None
    if ("(local_rank: " in text or "first observed failure" in text) and "failed (exitcode" not in text:
        found = list(_summary(text, following, make))
        return found, bool(found)
    if "RUNNING AT" in text and (ended := _HYDRA.search(text)) is not None:
        signal = next((hit for row in following(2) if (hit := _KILLED_BY.search(row))), None)
        number = -int(signal[1]) if signal else None
        told: dict[str, Any] = {"rank_basis": "launcher", "pid": int(ended[2]), "host": ended[3], "local_rank": None}
        return [
            make.clone(
                kind=Kind.LAUNCHER,
                name="event" if number != -6 and signal else "aborted",
                rank=int(ended[1]),
                number=number,
                **told,
            )
        ], True
    if "Culprit rank" in text or "Collective sequence number" in text or "Not all ranks joining" in text:
        return list(_analysis(text, following, make)), True
    if "operation counts" in text or "job process" in text or "unresponsive" in text or "Missing communicator" in text:
        found = list(_ras_text(text, following, make))
        return found, bool(found)
    if "collective" in text or "agging" in text or "latest states" in text:
        found = list(_desync(text, following, make))
        return found, bool(found)
    if "The actor died" in text or "ctor is dead" in text or "ActorDiedError" in text:
        return list(_dead_actor(text, following, make)), False
    if "Barrier timed out" in text or "stopped sending heartbeats" in text:
        found = list(_tasks(text, following, make))
        return found, bool(found)
    if "lost communication with a remote daemon" in text:
        return list(_lost_daemon(following, make)), True
    if "for process" in text and (process := _GPU_PROCESS.search(text)) is not None:
        return list(_poisoned(process, following, make)), True
    if "terminate called after" in text and (thrown := _THROWN.search(text)) is not None:
        return list(_thrown(thrown[1], following, make)), False
    if "Megascale detects a hang" in text:
        return list(_megascale(text, following, make)), False
    if text.rstrip().endswith(("Missing ranks:", "Stalled ranks:")):
        return list(_stalled(following, make)), True
    if "submitted to be" in text and not any(row.rstrip().endswith(" ranks:") for row in following(3)):
        return [make.clone(kind=Kind.NOTE, name="stall_report", rank=None)], False  # the tensors name their ranks
    if "Process name: " in text and (first := _PROCESS_NAME.search(text)) is not None:
        code = next((hit for row in [text, *following(1)] if (hit := _EXIT_CODE.search(row))), None)
        told = {"name": "first", "rank": int(first[1]), "rank_basis": "launcher", "local_rank": None, "pid": None}
        return [make.clone(kind=Kind.LAUNCHER, number=int(code[1]) if code else 1, **told)], True
    if _TABLE_HEAD.search(text) and (table := _table(text, following, make)) is not None:
        return [table], False
    if "state=s" in text and len(cells := _FR_CELL.findall(text)) > 1:
        op, sequence, _ = cells[0]
        going = all(state != "completed" for *_, state in cells) and len({cell[:2] for cell in cells}) == 1
        work = Work(_FR_OPS.get(op, op.upper()), int(sequence) if sequence else None)
        return [make.clone(kind=Kind.RECORDER, name="unfinished", work=work)] if going else [], True
    if "Reason: " in text and _NOT_STARTED.search(text):
        own = next((hit for row in following(30) if (hit := re.match(r"\s+RANK: +(\d{1,6})\s*$", row))), None)
        return [make.clone(kind=Kind.NOTE, name="not started", peers=(int(own[1]),))] if own else [], False
    if "Last error:" in text:
        return list(_last_error(text, following, make)), False
    return [], False


def _table(text: str, following: Following, make: Fact) -> Fact | None:
    """Return who differs in a table that one process prints of all: checksums, shapes; nobody where all agree.

    Numbers that are not all from 0 on are no such table; neither are values of which no one is that of most.
    """
    told: dict[int, str] = {}
    for at, row in enumerate([text, *(message_of(split_prefix(raw).text) for raw in following(64))]):
        entries = [(int(rank), value) for rank, value in _TABLE_ENTRY.findall(row)]
        entries = entries or [(rank, value) for value, ranks in _TABLE_SIDE.findall(row) for rank in numbers(ranks)]
        if any(rank in told for rank, _ in entries) or (not entries and (told or at > 4)):
            break
        told.update(entries)
    counts = Counter(told.values()).most_common(1)
    if len(told) < 3 or set(told) != set(range(len(told))) or 2 * counts[0][1] <= len(told):
        return None
    odd = tuple(sorted(rank for rank, value in told.items() if value != counts[0][0]))
    return make.clone(kind=Kind.NOTE, name="table", rank=None, rank_basis="", peers=odd, number=len(told))


def _frames(text: str) -> list[str]:
    """Return "file:line in function" of each frame in a text."""
    return [f"{found[1]}:{found[2]} in {found[3]}" for found in _FRAME.finditer(text)]


def _last_error(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    rest = text[text.find("Last error:") + 11 :].strip() or " ".join(
        message_of(split_prefix(row).text).strip() for row in following(1)
    )
    if rest:
        yield make.clone(kind=Kind.NCCL_WARN, name=warning_class(rest), detail=rest[:400], text=rest[:400])


def _raised(make: Fact, name: str, detail: str, text: str, frames: list[str]) -> Fact:
    told = {"detail": detail[:600], "text": text[:600], "frames": tuple(frames[-12:])}
    if make.rank is None and (place := _ON_RANK.search(detail)):
        make = make.clone(rank=int(place[1]), rank_basis="text")
    if (incident := incident_text.read_error(name, detail, make)) is not None:
        return incident
    return make.clone(kind=Kind.EXCEPTION, name=name, **told)


#: What a program says of itself behind its traceback.
_OWN_END = re.compile(
    r"(?i)\b(?:unhandled|uncaught|exception|crash(?:ed)?|fatal|abort(?:ed|ing))\b.{0,40}(?<![\-_])local[_ ]rank[ =:]+(\d{1,4})\b"
)
#: Words by which the further lines of an exception's text tell of another process.
_OF_OTHERS = re.compile(r"peer|remote|[Cc]losed|[Tt]imed? ?out")


def with_rest(fact: Fact, prefix: Prefix, rows: Sequence[str]) -> Fact:
    """Return an exception of a rank with what the lines of its text after the first say of other processes.

    Of one without a rank with the local rank that the program's next lines give it.
    """
    if fact.rank is None and fact.local_rank is None and prefix.place == "":
        for own in map(split_prefix, rows[:4]):
            if "Traceback" in own.text:
                break
            if own.tag == prefix.tag and own.rank is None and (told := _OWN_END.search(own.text)):
                return fact.clone(local_rank=int(told[1]))
    rest = [split_prefix(row) for row in rows[:6]] if fact.kind is Kind.EXCEPTION and prefix.basis == "prefix" else []
    for own in rest:
        body = message_of(own.text)
        if own.rank == prefix.rank and (not headless(body) or _EXCEPTION.match(body)):
            break
        if own.rank == prefix.rank and _OF_OTHERS.search(body):
            fact = fact.clone(detail=f"{fact.detail} {body.strip()}"[:600])
    return fact


def _flat_traceback(text: str, make: Fact) -> Fact | None:
    """Read a traceback whose newlines are lost."""
    frames, last = _frames(text), None
    for last in re.finditer(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.*)", text):
        pass
    return _raised(make, last[1], last[2], last[0], frames) if frames and last is not None else None


def _traceback(text: str, prefix: Prefix, following: Following, make: Fact) -> Fact | None:
    """Follow one traceback to its last line; lines of other ranks in between are skipped."""
    flat = _flat_traceback(text, make) if 'File "' in text else None
    if flat is not None:
        return flat
    clock = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T][\d:.,]+Z?")
    own = clock.sub("", prefix.tag)
    frames: list[str] = []
    code = ""
    rows = following(400)
    first = clock.sub("", split_prefix(rows[0]).tag) if rows else own
    if first != own and own.startswith(first) and (prefix.place or rows[0].startswith("  File ")):
        own = first  # SGLang and TensorRT-LLM head only the first line of a message
    of_rank = _OF_RANK.search(text)
    if of_rank is not None:
        make = make.clone(rank=int(of_rank[1]), rank_basis="text", place="")
    for index, raw in enumerate(rows, 1):
        row = split_prefix(raw)
        if own and clock.sub("", row.tag) != own:
            continue
        body = _LOGGER.sub("", message_of(row.text)).rstrip()
        if actor := _OF_ACTOR.search(body):
            make = make.clone(rank=int(actor[1]), rank_basis="text", place="")
        if not body or body.startswith((" ", "\t", "^")):
            if own_frame := _frames(body)[:1]:
                frames, code = frames + own_frame, ""
            else:
                code = body.strip(" \t^~") or code
            continue
        if task := _RAY_TASK.match(body):
            make = make.clone(pid=int(task[1]), host=task[2], place="")
        if (
            body.startswith(("Traceback", "ray.exceptions.RayTaskError("))
            or "direct cause" in body
            or "During handling" in body
        ):
            continue
        found = _EXCEPTION.match(body)
        if found is not None:
            raised = _raised(make, found["type"], found["text"] or "", body, frames).clone(code=code[:200])
            return with_rest(raised, prefix, rows[index:])
        unindented = _frames(body)[:1]  # the indentation is lost
        frames += unindented
        if not unindented and (own or not frames):
            return None
    return make.clone(kind=Kind.STACK, frames=tuple(frames[-12:])) if frames else None


def _stack(following: Following, make: Fact, inner: bool = True) -> Fact | None:
    """Read a stack, which faulthandler and py-spy print with the innermost frame first, into outermost-first order."""
    frames: list[str] = []
    for raw in following(60):
        body = message_of(split_prefix(raw).text)
        spy = _PYSPY.match(body.rstrip())
        own = _frames(body)[:1] or ([f"{spy[2]}:{spy[3]} in {spy[1]}"] if spy else [])
        if frames and not own and (inner or not body.startswith("  ")):
            break
        frames += own
    return (
        make.clone(kind=Kind.STACK, frames=tuple(reversed(frames[:12]) if inner else frames[-12:])) if frames else None
    )


def _summary(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """Read one entry of torchelastic's summary; `name` is "first" for the first failure seen."""
    first = "first observed failure" in text
    rank = local = code = pid = None
    trace = host = ""
    rows = [text, *following(60)]
    for at, row in enumerate(rows[: 10 if first else 5], 1):
        found = _SUMMARY_HOST.search(row)
        if found and not host:
            host = found[1]
        found = _SUMMARY_RANK.search(row)
        if found:
            if rank is not None:
                break
            rank, local = int(found[1]), int(found[2])
        found = _SUMMARY_EXIT.search(row)
        if found and rank is not None:
            code, pid = int(found[1]), int(found[2])
        found = _SUMMARY_TRACE.search(row)
        if found and rank is not None:
            trace = (_last_of_traceback(rows[at:]) if "Traceback (most" in found[1] else found[1])[:300]
            break
    if rank is not None and code is not None:
        told = {"local_rank": local, "number": code, "pid": pid, "host": host, "detail": trace}
        name = "first" if first else "failure"
        yield make.clone(kind=Kind.LAUNCHER, rank=rank, rank_basis="text", name=name, **told)


def _last_of_traceback(rows: Sequence[str]) -> str:
    """Return the exception at the end of a traceback in torchelastic's table, an empty string where it has none."""
    own = itertools.takewhile(lambda row: row.strip() and not _TABLE_ENDS.match(row), rows)
    raised = [text for row in own if _EXCEPTION.match(text := message_of(split_prefix(row).text).strip())]
    return raised[-1] if raised else ""


def _desync(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """TORCH_NCCL_DESYNC_DEBUG (torch/csrc/distributed/c10d/TraceUtils.h, 1.11 to 2.13)."""
    base = make.clone(kind=Kind.DESYNC)
    for found in _DESYNC_AT.finditer(text):
        rank, number = int(found[1]), int(found[3])
        yield base.clone(name="timeout", rank=rank, rank_basis="text", work=Work(found[2]), number=number)
    for pattern, name, detail in (
        (_NEVER, "lagging", "never joined any collective"),
        (_UNFINISHED, "unfinished", "joined but did not finish"),
        (_NOT_JOINED, "lagging", "did not join #{}"),
    ):
        for found in pattern.finditer(text):
            numbered = [int(part) for part in found.groups()[1:]] or [0]
            what = detail.format(numbered[-1])
            yield base.clone(name=name, peers=numbers(found[1]), number=numbered[0], detail=what)
    state = ("0", "")
    for row in [text, *following(64)] if "latest states" in text else []:
        for head in re.split(r"(?=#\d+ (?:started|finished) ranks:)", row):
            start = _STATE_HEAD.search(head)
            state = (start[1], start[2]) if start else state
            for found in _STATE.finditer(head):
                peers = numbers(found[1])
                yield base.clone(name=state[1], peers=peers, number=int(state[0]), work=Work(found[2]))


def _analysis(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """Read what torch's own analyser prints of one collective (torch/distributed/flight_recorder, 2.5 to 2.13).

    `name` is "missing" for the ranks that have not joined, else the kind of mismatch; `completed` is the group's size.
    """
    head = _FR_HEAD.search(text)
    rows = list(itertools.takewhile(lambda row: not _FR_HEAD.search(row), following(16))) if head else []
    whole = "\n".join([text, *rows])
    named, members = _FR_NAME.search(whole), _FR_EXPECTED.search(whole)
    told: dict[str, Any] = {"number": int(head[1]) if head else None}
    if named is not None and head is not None:
        told["work"] = Work(_FR_OPS.get(named[1], named[1].upper()), told["number"])
    told["completed"] = len(numbers(members[1])) if members else None
    base = make.clone(kind=Kind.RECORDER, rank=None, rank_basis="", **told)
    if missing := _FR_MISSING.search(whole):
        yield base.clone(name="missing", peers=numbers(missing[1]), text=whole[:600])
    for hit in _CULPRIT.finditer(whole):
        detail = f"expected {hit[4]} found {hit[5]}" if hit[4] is not None else (hit[6] or "")
        yield base.clone(name=hit[2], detail=detail, peers=(int(hit[1]),))


_ACTOR = re.compile(
    r"\b(pid|name|ip|rank|class_name)[:=]\s*([\w.:\-\[\]]+)|Worker exit type: (\w+)(?: Worker exit detail: (.{0,120}))?"
)


def _dead_actor(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """Ray (python/ray/exceptions.py, 2.0 to 2.50): the block that says which actor died."""
    told: dict[str, str] = {}
    rows = [text]
    for raw in following(14):
        row = split_prefix(raw).text
        if not row.strip() or row.lstrip().startswith(("Traceback", "File ")):
            break
        rows.append(row)
    for found in _ACTOR.finditer("\n".join(rows)):
        if found[1]:
            told.setdefault(found[1], found[2])
        else:
            told["exit"] = f"{found[3]} {found[4] or ''}".strip()
    if not told.keys() & {"pid", "name", "rank"}:
        return
    rank, pid = _number(told.get("rank", "").strip("[]")), _number(told.get("pid"))
    place = told.get("name") or f"{told.get('class_name', 'actor')} pid {pid}"
    if told.get("ip"):
        place += f" ({told['ip']})"
    basis = "" if rank is None else "text"
    own = {
        "rank": rank,
        "rank_basis": basis,
        "local_rank": None,
        "pid": pid,
        "host": "",
        "place": place,
        "where": told.get("ip", ""),
    }
    yield make.clone(kind=Kind.WORKER_DIED, name="actor", detail=told.get("exit", ""), text=" ".join(rows)[:600], **own)


_TASK_NAME = re.compile(r"/task:(\d+)")


def _tasks(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """XLA's coordination_service.cc, 2023 to 2026: tasks that sent no heartbeat, or did not come to a barrier."""
    base = make.clone(kind=Kind.ACCUSED, rank=None, rank_basis="")
    rows = [split_prefix(row).text.strip() for row in following(40)]
    if "stopped sending heartbeats" in text:
        listed = itertools.takewhile(lambda row: row.startswith("/job:"), rows)
        peers = tuple(int(number) for number in _TASK_NAME.findall(" ".join([text, *listed])))
        if peers:
            yield base.clone(name="unhealthy", peers=peers)
        return
    whole = " ".join([text, *rows])
    count = re.search(r"reached the barrier: ?(\d+)/(\d+)", whole)
    named = re.search(r"[tT]imed out task names:((?:\s*/job:\S+)+)", whole)
    peers = tuple(int(number) for number in _TASK_NAME.findall(named[1])) if named else ()
    if count is None:
        if peers:  # before 2024 all are listed, and how many came is not said
            yield base.clone(kind=Kind.ENGINE_WAIT, name="barrier")
            yield base.clone(name="barrier", peers=tuple(sorted(peers)))
        return
    told = {"completed": int(count[1]), "number": int(count[2])}
    phase = re.search(r"Id: ?(\S+?)\.?\s", whole)
    yield base.clone(kind=Kind.ENGINE_WAIT, name="barrier", detail=phase[1] if phase else "", **told)
    if (
        peers and len(set(peers)) == told["number"] - told["completed"]
    ):  # "some": not all are listed where they are many
        yield base.clone(name="barrier", peers=peers, **told)


def _megascale(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """Megascale's digest of a hang (libtpu, 2025 to 2026): a cause and the workers that it holds for the culprits."""
    whole = "\n".join([text, *(split_prefix(row).text for row in following(16))])
    cause = re.search(r"Potential cause: ?(.*)", whole)
    workers = re.search(r"Potential culprit workers: ?(.*)", whole)
    if cause or workers:
        named = " ".join(re.findall(r"[^\s,]+", workers[1])) if workers else ""
        yield make.clone(kind=Kind.ACCUSED, name="megascale", detail=cause[1] if cause else "", host=named, rank=None)


def _lost_daemon(following: Following, make: Fact) -> Iterator[Fact]:
    """Open MPI's orted or PRRTE, 1.6 to 5.0: the daemon of a node is gone, and with it the ranks of that node."""
    found = next((hit for row in following(6) if (hit := re.search(r"Remote daemon:.* on node (\S+)", row))), None)
    if found is not None:
        yield make.clone(kind=Kind.SCHEDULER, name="NODE FAILURE", host=found[1], rank=None, rank_basis="")


#: What the standard library throws because of the program itself, never because of a peer.
_OWN_FAULTS = ("std::bad_alloc", "std::bad_array_new_length", "std::out_of_range", "std::length_error", "std::bad_function_call",
               "std::bad_variant_access", "std::bad_optional_access")  # fmt: skip


def _thrown(name: str, following: Following, make: Fact) -> Iterator[Fact]:
    """An exception that C++ did not catch; those of torch, gloo and the standard library may follow from a peer."""
    own = (split_prefix(row) for row in following(4))
    what = next(
        (hit for row in own if row.rank == make.rank and (hit := re.search(r"what\(\): +(.*)", row.text))), None
    )
    standard = name.startswith(("c10::", "gloo::", "std::")) and name not in _OWN_FAULTS
    if what is not None and (not standard or what[1].startswith("NCCL error")):
        yield make.clone(kind=Kind.EXCEPTION, name=name, detail=what[1][:600])


# Linux drivers/gpu/drm/amd/amdgpu, 6.1 to 6.15: a page fault, and the process whose it is.
_GPU_PROCESS = re.compile(r"amdgpu ([\da-f:.]+): amdgpu: +for process (\S+) pid (\d+)")


def _poisoned(process: re.Match[str], following: Following, make: Fact) -> Iterator[Fact]:
    """The process whose fault is followed by an error of the GPU's memory, or a reset; others are tried again."""
    for row in following(8):
        if f"amdgpu {process[1]}" in row and re.search(r"uncorrectable hardware error|GPU reset begin", row):
            told = {"pid": int(process[3]), "detail": row.strip()[:300], "rank": None, "rank_basis": ""}
            yield make.clone(kind=Kind.CUDA, name="hardware", **told)
            return


def _stalled(following: Following, make: Fact) -> Iterator[Fact]:
    """Horovod's stall_inspector.cc, 0.20 to 0.28: for each rank the tensors that it lacks."""
    yield make.clone(kind=Kind.NOTE, name="stall_report", rank=None)
    for raw in following(64):
        found = re.search(r"(?:^|[\s>:])(!?)(\d+): ?\[([A-Za-z].*)", raw)
        if not raw.strip():
            continue
        if found is None:
            return
        marked = {"completed": 1} if found[1] else {}
        yield make.clone(
            kind=Kind.ACCUSED, name="horovod", peers=(int(found[2]),), detail=found[3][:200], rank=None, **marked
        )


_RAS_NEXT = re.compile(r"#\d+-\d+ |[A-Z]+$|[A-Z][a-z]+$|=+\s*$")
_LAUNCHED = re.compile(r"(?:(\d+) ranks? ha(?:s|ve)|Rank \d+ has) launched up to operation (\d+)")
_RAS_RANK = re.compile(
    r"Rank (\d+)(?: has launched up to operation \d+)? -- GPU \S+ managed by process (\d+) on node (\S+)"
)
_RAS_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing GPUs? ([\d,]+)")
_RAS_MISSING = re.compile(r"The (?:missing|unresponsive|unknown) ranks?: ([\d,\- ]+)")


def _ras_text(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """NCCL's RAS report as text (src/ras/client_support.cc, 2.24 to 2.30), as `ncclras` prints it.

    The ranks that a MISMATCH lists are those whose count is not the most frequent one; `name` is "behind" or "ahead".
    """
    base = make.clone(kind=Kind.RAS, rank=None, rank_basis="", local_rank=None, pid=None)
    rows = [split_prefix(row).text for row in following(200)]
    rows = list(itertools.takewhile(lambda row: _RAS_NEXT.match(row) is None, rows))
    if "operation counts" in text:
        op = re.search(r"different (\w+) operation counts", text)
        if op is None or op[1] == "collective":  # NCCL 2.27 heads the counts with the operation
            heads = [hit for row in rows if (hit := re.match(r"\s*(\w+) operation counts:", row))]
            op = heads[0] if len(heads) == 1 else None
        base = base.clone(work=Work(op[1].upper()) if op else None)
        counts = [(int(hit[1] or 1), int(hit[2])) for row in rows if (hit := _LAUNCHED.search(row))]
        listed = [hit for row in rows if (hit := _RAS_RANK.search(row))]
        if len(counts) > 1:
            most = max(counts)
            rare = [count for count in counts if count is not most]
            whole = len(listed) == sum(count for count, _ in rare)
            ranks = [int(hit[1]) for hit in listed] if whole else []
            low = all(number < most[1] for _, number in rare)
            yield _uneven(base, low, ranks, listed[0][3] if listed else "", counts)
    elif "considered dead" in text or "unresponsive" in text or "Missing communicator" in text:
        base = base.clone(name="dead" if "considered dead" in text else "silent")
        for row in rows[:64]:
            process, missing, ranked = (one.search(row) for one in (_RAS_PROCESS, _RAS_MISSING, _RAS_RANK))
            if process:
                yield base.clone(pid=int(process[1]), host=process[2], detail=row.strip())
            elif missing:
                yield base.clone(peers=numbers(missing[1]), detail=row.strip())
            elif ranked:
                yield base.clone(peers=(int(ranked[1]),), pid=int(ranked[2]), host=ranked[3])


def _uneven(base: Fact, low: bool, ranks: list[int], host: str, counts: list[tuple[int, int]]) -> Fact:
    """Return that some ranks have launched more or fewer operations; `counts` are (ranks, operations)."""
    return base.clone(
        name="behind" if low else "ahead",
        peers=tuple(sorted(ranks)),
        number=min(number for _, number in counts),
        completed=sum(count for count, _ in counts),
        host=host,
        detail="; ".join(f"{count} ranks at {number}" for count, number in counts),
    )


# --- JSON documents ---


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        items = value.get("items")
        yield from _objects(items) if isinstance(items, list) else iter([value])
    elif isinstance(value, list):
        for one in value[:100_000]:
            yield from _objects(one)


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) and abs(value) < 1 << 53:
        return int(value)
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value) else None


def read_document(value: object, make: Fact) -> list[Fact]:
    """Return the facts of one JSON document; an empty list for one that is none of these."""
    found: list[Fact] = []
    for one in _objects(value):
        if isinstance(one.get("communicators"), list):
            found += _ras_json(one, make)
        elif "culprits" in one and "op_id" in one:
            found += _incident(one, make)
        elif isinstance(one.get("incident"), Mapping):
            found += _written(one, make)
        elif "involvedObject" in one or one.get("kind") == "Event":
            found += _cluster_event(one, make)
        elif isinstance(one.get("status"), Mapping) and "containerStatuses" in one["status"]:
            found += _pod(one, make)
        elif str(one.get("name", "")).startswith("torchelastic.worker.status"):
            found += _elastic_event(one, make)
        elif isinstance(one.get("message"), (str, Mapping)) and ("extraInfo" in str(one)[:100_000]):
            found += _error_file(one, make)
    return found


def read_line(text: str, make: Fact) -> list[Fact]:
    """Return the facts of one line of a log that holds a JSON object, wherever it begins."""
    start = text.find("{")
    if start < 0:
        return []
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return []
    return read_document(value, make)


def _error_file(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """torch/distributed/elastic/multiprocessing/errors/error_handler.py, 1.9 to 2.15: what @record leaves."""
    message = one["message"]
    told = message if isinstance(message, Mapping) else {"message": message}
    text, extra = str(told.get("message", "")), told.get("extraInfo")
    frames = _frames(str(extra.get("py_callstack", ""))) if isinstance(extra, Mapping) else []
    facts = [fact.clone(frames=tuple(frames[-12:])) for fact in parse_text(text, make.clone(text=text[:600]))]
    return facts or [_raised(make, "Exception", text, text, frames)]


def _elastic_event(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """torch/distributed/elastic/events/api.py, 1.9 to 2.15: one event for each worker."""
    metadata = one.get("metadata")
    data: Mapping[str, Any] = {**one, **metadata} if isinstance(metadata, Mapping) else one
    raw = metadata.get("raw_error") if isinstance(metadata, Mapping) else None
    rank = _number(data.get("global_rank"))
    if not str(one.get("name")).endswith(".FAILED") or rank is None:
        return []
    own = make.clone(rank=rank, rank_basis="text")
    numbered = {"local_rank": "local_rank", "number": "exit_code", "pid": "worker_id"}
    told = {name: _number(data.get(theirs)) for name, theirs in numbered.items()}
    fact = own.clone(kind=Kind.LAUNCHER, name="event", detail=str(raw or "")[:400], **told)
    if not isinstance(raw, str):
        return [fact]
    try:
        inner = json.loads(raw)
    except (ValueError, RecursionError):
        inner = None
    for found in re.finditer(r"Signal (\d+) \(", raw):
        fact.number = -int(found[1])
    return [fact, *(_error_file(inner, own) if isinstance(inner, Mapping) and "message" in inner else [])]


_REASONS = frozenset(
    ["OOMKilled", "OOMKilling", "SystemOOM", "Evicted", "Preempted", "Preempting", "NodeNotReady", "NodeLost",
     "TaintManagerEviction", "DeviceUnhealthy", "UnexpectedAdmissionError", "NodeShutdown"]
)  # fmt: skip


def _of_cluster(make: Fact, reason: object, host: str, detail: str = "", number: int | None = None) -> list[Fact]:
    """Return the event as a fact, if it is of a kind that ends processes."""
    text = f"{reason} {host} {detail}".strip()[:400]
    told = {"name": str(reason), "host": host, "detail": detail[:300], "number": number, "text": text}
    return [make.clone(kind=Kind.SCHEDULER, **told)] if str(reason) in _REASONS else []


def _cluster_event(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """Kubernetes core/v1 and events.k8s.io/v1 Event, 1.20 to 1.34."""
    target = one.get("involvedObject") or one.get("regarding")
    target = target if isinstance(target, Mapping) else {}
    text = str(one.get("message") or one.get("note") or "")
    host = f"{str(target.get('kind', '')).lower()}/{target.get('name', '')}"
    facts = list(parse_text(text, make.clone(text=text[:400])))
    return facts + _of_cluster(make, one.get("reason", ""), host, text)


def _pod(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """Kubernetes core/v1 Pod with its containers' ends."""
    metadata = one.get("metadata")
    host = f"pod/{metadata.get('name', '') if isinstance(metadata, Mapping) else ''}"
    facts = _of_cluster(make, one["status"].get("reason", ""), host)
    for status in _items(one["status"]["containerStatuses"]):
        for when in ("state", "lastState") if isinstance(status, Mapping) else ():
            state = status.get(when)
            end = state.get("terminated") if isinstance(state, Mapping) else None
            if isinstance(end, Mapping):
                facts += _of_cluster(make, end.get("reason"), host, number=_number(end.get("exitCode")))
    return facts


def _ras_json(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """NCCL src/ras, JSON of 2.28.7 and newer: counts per rank and the ranks that did not answer."""
    facts: list[Fact] = []
    for comm in one["communicators"]:
        if not isinstance(comm, Mapping):
            continue
        base = make.clone(kind=Kind.RAS, rank=None, rank_basis="", completed=_number(comm.get("size")))
        counts: dict[int, int] = {}
        hosts: dict[int, str] = {}
        for row, rank in _ranked(comm.get("ranks")):
            done, status = row.get("collective_counts"), row.get("status")
            if isinstance(done, Mapping):
                counts[rank] = sum(_number(value) or 0 for value in done.values())
            hosts[rank] = str(row.get("host", ""))
            error = status.get("async_error") if isinstance(status, Mapping) else None
            if error not in (None, 0, "0", "ncclSuccess", "ok", False):
                detail = f"asynchronous error {error}"
                facts.append(base.clone(name="error", peers=(rank,), detail=detail, host=hosts[rank]))
        kinds = Counter(counts.values()).most_common()
        if len(kinds) > 1:
            odd = [rank for rank, number in counts.items() if number != kinds[0][0]]
            low = all(counts[rank] < kinds[0][0] for rank in odd)
            told = _uneven(base, low, odd, hosts[min(odd)], [(count, number) for number, count in kinds])
            facts.append(told.clone(completed=base.completed))
        for row, rank in _ranked(comm.get("missing_ranks")):
            status = row.get("status")
            dead = isinstance(status, Mapping) and bool(status.get("considered_dead"))
            where = {"host": str(row.get("host", "")), "pid": _number(row.get("pid"))}
            detail = f"rank {rank} does not answer"
            facts.append(base.clone(name="dead" if dead else "silent", peers=(rank,), detail=detail, **where))
    for fact in facts:
        fact.text = f"RAS: {fact.name} {', '.join(map(str, fact.peers))} {fact.detail}"[:400]
    return facts


def _ranked(value: object) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the rows of a list that have a rank, with it."""
    for row in _items(value):
        if isinstance(row, Mapping) and (rank := _number(row.get("rank"))) is not None:
            yield row, rank


def _written(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """The report that ncclguard writes of its incident, with the time and the size of the job."""
    try:
        when = datetime.fromisoformat(str(one.get("written_at"))).timestamp()
    except ValueError:
        when = None
    return [
        fact.clone(number=_number(one.get("world_size")), when=when) for fact in read_document(one["incident"], make)
    ]


def _sides(one: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what ranks called that differ, as an incident has it: pairs of a call and its ranks."""
    for side in _items(one.get("sides")):
        if isinstance(side, list) and len(side) == 2 and isinstance(side[0], str):
            yield side[0][:300], tuple(number for rank in _items(side[1]) if (number := _number(rank)) is not None)


def _incident(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """ncclguard's own incident: the verdict that the ranks agreed on while they lived."""
    ranks = tuple(number for value in _items(one.get("culprits")) if (number := _number(value)) is not None)
    stacks = [row["stack"] for row, rank in _ranked(one.get("ranks")) if rank in ranks and _items(row.get("stack"))]
    participants, timeout = one.get("participants"), one.get("timeout")
    summary = str(one.get("summary", ""))
    lost = [
        rank
        for change in _items(one.get("afterwards"))
        if isinstance(change, dict) and change.get("kind") in ("went on", "rejoined")
        for rank in _items(change.get("ranks"))
    ]
    without = tuple(number for rank in lost if (number := _number(rank)) is not None)
    went_on = [make.clone(kind=Kind.NOTE, name="went on", peers=without)] if without else []
    return [
        make.clone(
            kind=Kind.GUARD,
            name=str(one.get("cause", "unknown")),
            peers=ranks,
            work=Work(str(one.get("op")) if one.get("op") else None),
            seconds=float(timeout) if isinstance(timeout, (int, float)) else None,
            completed=len(participants) if isinstance(participants, list) else None,
            detail=summary.rstrip(".")[:600],
            advice=tuple(str(one[name]) for name in ("advice", "further") if one.get(name)),
            text=(summary or str(one.get("op_id", "")))[:600],
            frames=tuple(str(frame) for frame in stacks[0])[-12:] if stacks else (),
            sides=tuple(_sides(one)),
            waiting=tuple(rank for row, rank in _ranked(one.get("ranks")) if row.get("state") in ("running", "ready")),
        ),
        *went_on,
    ]


# --- what the ranks were doing, and how many there are ---

_BAR = re.compile(
    r"(?P<what>[^|\r\n]{0,120}?)\s*(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<at>[\d.]+\w?)/(?P<of>[\d.]+\w?) "
    r"\[(?P<spent>[\d:]+)<"
)
_PERCENT = re.compile(
    r"(?P<what>[A-Za-z][\w ,()'\-]{2,80}?):?\s+(?P<percent>\d{1,3}) ?% (?:at|after|in) (?P<spent>\d+:\d\d(?::\d\d)?)"
)
_WORLD = re.compile(
    r"\b(?:mpirun|mpiexec|horovodrun)\b.* -(?:np?|-np) (\d{1,6})\b|(?<![A-Za-z_])(?:WORLD_SIZE|world[_ ]size|dist(?:ributed)?_world_size"
    r"|num_processes|NTasks)['\"]?\s*[=:]+\s*['\"]?(\d{1,6})\b|store-based barrier for (?:key:\S+ with )?(\d{1,6}) nodes|MEMBER: \d+/(\d{1,6})\b|ncclguard: observes the (\d{1,6}) ranks of this job",
    re.IGNORECASE,
)

_MANY = r"(?<![\d/.:])(?:[2-9]|[1-9]\d{1,4})"
_SEVERAL = re.compile(
    r"\b(?i:both|two|three|four|eight|all|beide[nr]?|zwei|vier) (?i:nodes|hosts|pods|machines|Knoten|Rechner)\b|"
    rf"{_MANY} ?(?i:nodes|pods|hosts|machines|Knoten|Rechner)\b(?! (?:are )?available)|{_MANY} ?(?:台|个节点|節點|节点|ノード|узл|машин|хост)|[两二三四八多双]机|两台|"
    rf"{_MANY} ?[x×*] ?\d+ (?!G[Bi])(?:\w+ )?(?:GPU|NPU|XPU|HPU)s?\b|\bkubectl (?:-\S+ \S+ )*logs\b.* (?:-l|--selector|--all-pods)\b|"
    # A worker of Kubeflow's operators is one of several pods, of which another is the master or the launcher.
    r"\bkubectl (?:-\S+ \S+ )*logs\b.*-worker-|\b(?:--?|PET_)?(?i:nnodes)[ =]\d+:(?:[2-9]|\d\d)|\bgroup_(?:world_size=(?:[2-9]|\d\d)|rank=[1-9])"
)
_SEVERAL_WORDS = (
    "odes", "ods", "osts", "achines", "PU", "kubectl", "both", "noten", "echner", "台", "节点", "節點", "ノード", "机", "узл", "машин", "хост",
    "nnodes", "NNODES", "group_world_size", "group_rank",
)  # fmt: skip
#: What starts the ranks of a node: torchrun, Accelerate's and DeepSpeed's launchers, nvidia-resiliency-ext's.
_STARTS_RANKS = re.compile(
    r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|torch/distributed/elastic/|torch\.distributed\.elastic\b|\baccelerate[ -]launch\b|"
    r"\bft_launcher\b|\[launch\.py:\d+|\bdeepspeed\.launcher\b|\bnproc[-_]per[-_]node[ =](?:[2-9]|\d\d)"
)
#: The process that speaks for torchrun's agent of a node, as Python's and torch's logging head its lines.
_AGENT = re.compile(r"\b[EWI]\d{4} [\d:.]+ (\d+) \S*torch/distributed/elastic/")
_PEERS = re.compile(r"Expected number of connected peer ranks is ?: (\d{1,6})")  # gloo/rendezvous/context.cc
#: The guard's own lines about an evaluation, whose names have a step.
_OF_GUARD_AT = re.compile(r"ncclguard (?:incident|evaluation) |='evaluation ")
_RAISED_AT = re.compile(r"[\w.]*(?:Error|Exception)\b: ")  # the message of an exception may tell the step
#: What an engine prints every few seconds while it makes tokens (vLLM, SGLang), and a server of each answer.
_SERVES = re.compile(
    r"\"POST /\S* HTTP/\d[\d.]*\" 200|Avg generation throughput: (?!0\.0 )[\d.]+ tokens/s|Decode batch.*gen throughput \(token/s\): (?!0\.0+,)"
)
#: Requests that an engine works at and that wait for it (vLLM vllm/v1/metrics/loggers.py).
_LOAD = re.compile(r"(?:\bEngine (\d+): .*)?\bRunning: (\d+) reqs, Waiting: (\d+) reqs\b")
#: A note beside stacks on when they were taken.
_STACKS_AT = re.compile(
    r"(?i)\b(?:stack(?: ?trace)?s?|dumps?|dumped|py-?spy|pystack)\b[^.;\d]{0,40}?(?<![\d:])(\d{1,2}:\d\d(?::\d\d)?)\b"
)
_STEP = re.compile(r"\b(?:step|iter(?:ation)?|epoch|loss|batch)\b(?: {1,9}|\W{0,3})\d", re.IGNORECASE)
_STEP_NUMBER = re.compile(
    r"\b(?:(?:global_?)?step|iter(?:ation)?)\b(?: {1,9}|\W{0,3})(\d{1,9})\b|\bepoch\b\W{0,3}(\d{1,9})\b", re.IGNORECASE
)
#: What a program prints that works through something: "consolidated 17/288 shards".
#: Not whose place among others it is: "Worker 4/8 starts".
_COUNT = re.compile(
    r"(?<![\d/.\-])(?<!(?i:orker) )(?<!(?i:rocess) )(?<!(?i:eplica) )(?<!(?i:rank|node|host|proc) )(?P<at>\d{1,9}) ?(?:/|of) ?(?P<of>\d{1,9}) (?P<unit>[a-z]{3,})"
)
_NODES = re.compile(
    r"(?:PET_|(?<![A-Za-z_]))(?:--?nnodes|nnodes|num_nodes|num_machines|NNODES|SLURM_NNODES|SLURM_JOB_NUM_NODES|N_NODES)"
    r"['\"]?[\s=:]+['\"]?(\d{1,5})\b(?!:)",
    re.IGNORECASE,
)
_LOCAL_SIZE = re.compile(
    r"(?<![A-Za-z])(?:n_|num_)?(?:--?nproc[-_]per[-_]node|LOCAL_WORLD_SIZE|local_world_size|num_local_procs|nproc_per_node|NPROC_PER_NODE|gpus_per_node|GPUS_PER_NODE)['\"]?[\s=:]+['\"]?(\d{1,3})\b"
)

# Phases by the words that frameworks print or that stand in a stack's function names; the first match counts.
_PHASES: tuple[tuple[str, str], ...] = (
    ("preprocess", (r"[Tt]okeniz|Running tokenizer|[Pp]re-?process|^Map(?: \(num_proc|:)|Generating \w+ split|Grouping texts|"
     r"[Pp]acking|line-offset|building (?:\w+ )?(?:index|dataset)|docs scanned|load_dataset|Filter(?: \(num_proc|:)")),
    ("lock", r"file_baton\.py|\bfilelock\b"),
    ("compile", r"torch/_dynamo/\S+ .*\brecompiling\b|\bwarmup: compiling\b|\bAUTOTUNE\b|\bJIT Compiling\b"),
    ("skipped", r"\b(?:early return|return(?:s|ing)? early)\b"),
    ("upload", r"[Pp]ush(?:ing)? (?:\w+ )?to (?:the )?hub|push_to_hub|[Uu]pload"),
    ("checkpoint", (r"[Ss]aving (?:model|checkpoint|state|optimizer|artifact|the model|latest)|dcp\.save|dcp_save|torch\.save|"
     r"[Ss]av(?:e|ing)_?(?:checkpoint|pretrained|model|state)|state_dict_saver|writ(?:e|ing) checkpoint|\bwritten [\d.]+ ?[KMGT]i?B of |checkpoint/filesystem")),
    ("logger", r"wandb\.(?:init|sdk)|wandb/sdk|wandb_init|mlflow|swanlab|aim\.Run|comet_ml"),
    ("loader", r"decord|webdataset|torchvision\.io|video_reader|read_video|utils/data/dataloader|_MultiProcessingDataLoaderIter|DataLoader worker"),
    ("evaluate", r"Running (?:Evaluation|Prediction|Validation)|[Vv]alidat(?:ion|ing)|[Ee]valuat(?:ion|ing)|evaluation_loop|eval_step|_validate\b"),
    ("generate", r"\bgenerate\b|generation/utils|[Gg]enerating (?:samples|responses|completions|video|image)|rollout"),
    ("load", r"[Ll]oading (?:checkpoint shards|model|weights)|from_pretrained"),
    ("succeeded", (r"\bexit_code=0\b|^exit=0$|^(?:SUCC \S+ -- )?Job '[^']+' succeeded|worker group successfully finished|Reporting training SUCCESS\s*$|\[launch\.py:\d+:main\] Process \d+ exits successfully|Job completed successfully|# Out of bounds values : 0 OK|"
     r"^\s*--- PASS: \S+ \([\d.]+s\)|^(?!.*\b[1-9]\d* (?:failed|failures?|errors?)\b)\W*\d+ (?:(?:tests?|scenarios?|cases?|specs?) )?passed, 0 (?:failed|failures|errors)\b|^=+ (?!.*\b(?:failed|errors?)\b)\d+ passed\b.* in [\d.]+s|^(?:\+ )?(?:exit code: 0|exit 0)$|, exit 0$|"
     r"^\d+(?:\s+|\|)(?:[\w.\-]+(?:\s+|\|)){0,5}COMPLETED(?:\s+|\|)0:0\b|"  # sacct
     r"\bTraining Progress: 100%|^State: COMPLETED \(exit code 0\)|\b(?i:job)\b.{0,30}\b(?i:completed)\b.{0,40}\b[Ee]xit ?[Cc]ode[ :=]+0(?::0)?\b|^(?!.*\b(?i:state|failed|error|worker|process|task|pid|rank ?\d+)\b).*\(exit(?: code| status)?[ :=]+0\)$|"
     r"\b[Aa]ll (?!(?:the )?other|but )(?:\w+ ){0,2}(?:replicas|ranks|workers|processes|tasks|nodes) (?:\w+ )?(?:finished|exited|completed|ended) (?:\w+ )*(?:code|status) 0\b|"
     r"^Trial status: \d+ TERMINATED\s*$|^\s*Number of failed trials: +0$|\b(?i:sweep|study|search|job|all trials) (?:is )?(?:finished|complete|completed|done)\b.{0,30}\bexit code 0\b")),
    ("finished", (r"[Ff]inished training|[Tt]raining (?:loop )?(?:is )?(?:done|finished|complete)|train_runtime|End of training|"
     r"^`Trainer\.fit` stopped: |\[after training is done\]|\bdone, (?:wrote|saved) |exiting (?:program|train)|[Ff]inished ok\b|[Rr]eached max_steps|\b[Aa]ll (?:tasks|steps|epochs|evaluations) \w+(?:ed|ne)\b|"
     r"\bexit(?:ed|ing)?(?: with)?(?: code| status)? 0\b|\b[Ff]inished, (?:cleaning|shutting|exiting)\b|\b(?:step|iter(?:ation)?|epoch) (?P<of>\d+)/(?P=of) done\b")),
)  # fmt: skip
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _PHASES)


def _duration(text: str) -> float:
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part or 0)
    return total


def phase_of(text: str) -> str | None:
    """Return the phase that a line or a stack frame speaks of: preprocess, checkpoint, evaluate, ... or None."""
    for name, pattern in _COMPILED:
        if pattern.search(text):
            return name
    return None


def _stated(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[found.lastindex or 1]) if found else None


def sizes_of(text: str) -> tuple[int | None, int | None, int | None]:
    """Return the numbers of ranks, of nodes and of ranks on a node that a line states, None for what it does not."""
    world = _stated(_WORLD, text)
    if world is None and "peer ranks" in text and (peers := _stated(_PEERS, text)) is not None:
        world = peers + 1
    return world, _stated(_NODES, text), _stated(_LOCAL_SIZE, text)


def of_several_nodes(text: str) -> bool:
    """Return whether a line says that the job runs on several nodes, or that the log is of several pods."""
    if "store-based barrier" in text:  # torch calls ranks nodes there
        return False
    return any(word in text for word in _SEVERAL_WORDS) and _SEVERAL.search(text) is not None


def starts_ranks(text: str) -> bool:
    """Return whether a line shows a launcher that starts the ranks of its node."""
    return ("torch" in text or "launch" in text or "nproc" in text) and _STARTS_RANKS.search(text) is not None


def agent_of(text: str) -> int | None:
    """Return the process of torchrun's agent that prints a line."""
    found = _AGENT.search(text) if "torch/distributed/elastic/" in text else None
    return int(found[1]) if found else None


def read_progress(text: str, make: Fact, last: bool) -> Iterator[Fact]:
    """Yield what a line of context says about progress; `seconds` is the time spent, `number` the percentage.

    `last`: the line is among the last ones of its file.
    """
    phase = phase_of(text)
    if last and (taken := _STACKS_AT.search(text)):
        yield make.clone(kind=Kind.NOTE, name="stacks taken", detail=taken[1].zfill(5))
    if load := _LOAD.search(text):
        yield make.clone(kind=Kind.NOTE, name="load", detail=load[1] or "", number=int(load[2]) + int(load[3]))
    found = None
    for found in _BAR.finditer(text) if "%|" in text else ():
        pass  # a line of several bars: the last one counts
    if found is None and "%" in text:
        found = _PERCENT.search(text)
    if found is not None:
        yield make.clone(
            kind=Kind.PROGRESS,
            name=phase or "train",
            detail=found[0].strip()[-200:],
            number=int(found["percent"]),
            seconds=_duration(found["spent"]),
            after_symptom=last,
        )
    elif (
        last
        and (_SERVES.search(text) or _STEP.search(text))
        and not (_RAISED_AT.match(text) or _OF_GUARD_AT.search(text) or "CANCELLED AT" in text)  # STEP 12.0 of Slurm's
    ):
        name = "serve" if _SERVES.search(text) else phase or "train"
        numbered = min(_STEP_NUMBER.finditer(text), key=lambda one: one[1] is None, default=None)
        number = int(numbered[1] or numbered[2]) if numbered else None
        yield make.clone(kind=Kind.ALIVE, name=name, detail=text[-200:], number=number, after_symptom=True)
    count = _COUNT.search(text) if found is None and _STEP.search(text) is None else None
    if count is not None and int(count["at"]) < int(count["of"]):
        told = {
            "number": int(count["at"]),
            "completed": int(count["of"]),
            "detail": count["unit"],
            "after_symptom": last,
        }
        yield make.clone(kind=Kind.NOTE, name="count", **told)
    if found is None and phase is not None:
        yield make.clone(kind=Kind.PHASE, name=phase, detail=text[-200:], after_symptom=last)
