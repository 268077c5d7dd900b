"""Render the log that a job would have left, from an incident's facts, in the format of its torch version.

Every kind of fact has one function; nothing is written that the facts do not hold, except what torch itself repeats
(a timeout is printed up to three times) and the clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Event = Mapping[str, Any]
DEFAULT_WORLD = 4  # where facts say "all but rank 0" and no size


def version_of(entry: Mapping[str, Any]) -> float:
    """Return the torch version as 2.04 for 2.4; 2.4 where the facts do not say."""
    notes = str(entry.get("log_format_notes") or "")
    text = str(entry["versions"].get("torch", ""))
    if text.startswith("<") or notes.startswith("Old:"):
        return 1.13
    found = re.search(r"(\d+)\.(\d+)", text)
    return int(found[1]) + int(found[2]) / 100 if found else 2.04


class Renderer:
    """Lines of one incident; `version` decides the format, the clock only moves forward."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry = entry
        self.version = version_of(entry)
        self.seconds = 3600.0

    def _clock(self) -> str:
        self.seconds += 0.731
        hours, rest = divmod(self.seconds, 3600)
        return f"{int(hours) % 24:02d}:{int(rest // 60):02d}:{rest % 60:012.9f}"

    def _head(self, rank: int | None, line: int = 632, severity: str = "E") -> str:
        if self.version >= 2.04:
            return (
                f"{f'[rank{rank}]:' if rank is not None else ''}[{severity}709 {self._clock()} "
                f"ProcessGroupNCCL.cpp:{line}] "
            )
        return (
            f"{f'[rank{rank}]:' if rank is not None and self.version >= 2.02 else ''}[{severity} "
            f"ProcessGroupNCCL.cpp:{line}] "
        )

    def _group(self, event: Event, rank: int | None) -> str:
        name = event.get("pg")
        inner = event.get("group_rank", rank)
        if name is None:
            return ""
        return f"[PG {str(name).replace('GUID', 'PG GUID')} Rank {inner}] "

    def ranks(self, event: Event) -> list[int | None]:
        """Return the ranks an event speaks of; "non-zero" and the like become all ranks but 0."""
        rank = event.get("rank")
        if isinstance(rank, list):
            return list(rank)
        if isinstance(rank, int) or rank is None:
            return [rank]
        world = self.entry.get("world_size") or DEFAULT_WORLD
        return list(range(1, world)) if rank in ("non-zero", "1..n", "others", "other") else [None]

    def work(self, event: Event) -> str:
        """Return `WorkNCCL(...)` with the fields of this version."""
        op = str(event.get("op") or "ALLREDUCE")
        op = op if re.fullmatch(r"\w+", op) else "ALLREDUCE"
        parts = [f"SeqNum={event['seq']}"] if event.get("seq") is not None else []
        parts.append(f"OpType={op}")
        if event.get("shape") is not None:
            parts.append(f"TensorShape={event['shape']}")
        elif event.get("numel_in") is not None:
            parts.append(f"NumelIn={event['numel_in']}, NumelOut={event.get('numel_out', event['numel_in'])}")
        parts.append(f"Timeout(ms)={event.get('timeout_ms') or 600000}")
        return f"WorkNCCL({', '.join(parts)})"

    def watchdog_timeout(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            inner = event.get("group_rank", rank)
            caught = "Caught" if self.version < 2 else "Watchdog caught"
            ran = event.get("ran_ms") or (event.get("timeout_ms") or 600000) + 17
            group = self._group(event, rank)
            again = f"[repeated {event['repeated']}x across cluster]" if event.get("repeated") else ""
            text = (
                f"{f'[Rank {inner}] ' if inner is not None else ''}{caught} collective operation timeout: "
                f"{self.work(event)} ran for {ran} milliseconds before timing out."
            )
            yield f"{self._head(rank)}{group if self.version >= 2.04 else ''}{text}{again}"
            if event.get("last_enqueued") is not None or event.get("last_completed") is not None:
                yield from self.watchdog_status(event)
            yield f"{self._head(rank, 1414)}{group}Process group watchdog thread terminated with exception: {text}"
            yield "terminate called after throwing an instance of 'c10::DistBackendError'"
            yield f"  what():  {group}Process group watchdog thread terminated with exception: {text}"
            if event.get("op") and not re.fullmatch(r"\w+", str(event["op"])):
                yield from self._frame(rank, str(event["op"]))

    def _frame(self, rank: int | None, text: str) -> Iterator[str]:
        name = re.search(r"[\w.]+\.\w+", text)
        if name:
            yield "Thread 0x00007f01 (most recent call first):"
            yield f'  File "{name[0].replace(".", "/")}.py", line 10 in {name[0]}'

    def watchdog_status(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            group = self._group(event, rank) or f"[PG 0 Rank {rank}] "
            last, done = event.get("last_enqueued", -1), event.get("last_completed", -1)
            seq = event.get("seq", -1)
            if self.version < 2.06:
                for what in (
                    "Exception (either an error or timeout) detected by watchdog at work",
                    "Timeout at NCCL work",
                ):
                    yield (
                        f"{self._head(rank, 1785)}{group}{what}: {seq}, last enqueued NCCL work: {last}, last "
                        f"completed NCCL work: {done}."
                    )
            else:
                started = f" last started work: {done + 1} ({event.get('op')})," if self.version >= 2.13 else ""
                yield (
                    f"{self._head(rank, 2241)}{group} failure detected by watchdog at work sequence id: {seq} "
                    f"PG status: last enqueued work: {last},{started} last completed work: {done}"
                )

    def blocking_wait_timeout(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            suffix = "." if self.version >= 2.06 else " (TORCH_NCCL_BLOCKING_WAIT=1)."
            yield f"{self._head(rank, 756)}[Rank {rank}] Work {self.work(event)} timed out in blocking wait{suffix}"

    def heartbeat_stuck(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            yield (
                f"{self._head(rank, 1375, 'F')}{self._group(event, rank)}ProcessGroupNCCL's watchdog got stuck "
                f"for {event['seconds']} seconds without making progress in "
                "monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., "
                "CudaEventDestroy) hang blocking the watchdog"
            )

    def dump_signal_received(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            yield (
                f"{self._head(rank, 1682)}[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal "
                f"due to a collective timeout from  rank {event['from_rank']} and we will try our "
                f"best to dump the debug info. Last enqueued NCCL work: {event['last_enqueued']}, last "
                f"completed NCCL work: {event['last_completed']}.This is most likely caused by incorrect usages "
                f"of collectives"
            )

    def dump_signal_observed(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            yield (
                f"{self._head(rank, 1669)}[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Observed flight recorder "
                f"dump signal from another rank via TCPStore."
            )

    def dump_signal_first(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            yield (
                f"{self._head(rank, 2573)}[PG ID 0 PG GUID 0(default_pg) Rank {rank}] First PG on this rank to "
                f"signal dumping."
            )

    def watchdog_exception(self, event: Event) -> Iterator[str]:
        yield (
            f"{self._head(0, 1414)}{str(event['note']).replace('watchdog thread', 'Process group watchdog thread', 1)}"
        )

    def fingerprint(self, event: Event) -> str:
        """Return a `CollectiveFingerPrint(...)`; one without a shape is the zeroed one of an absent peer."""
        seq = f"SequenceNumber={event['seq']}" if event.get("seq") is not None else ""
        if event.get("shape") is None:
            return f"CollectiveFingerPrint({seq}OpType={event['op']})"
        options = (
            f"TensorOptions(dtype={str(event['dtype']).lower()} (default), device=cuda, layout=Strided "
            f"(default), requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))"
        )
        shape = ", ".join(map(str, event["shape"]))
        return (
            f"CollectiveFingerPrint({seq + ', ' if seq else ''}OpType={event['op']}, TensorShape=[{shape}], "
            f"TensorDtypes={event['dtype']}, TensorDeviceTypes={options})"
        )

    def collective_mismatch(self, event: Event) -> Iterator[str]:
        """Each rank with a real fingerprint compares itself with the first that differs, as torch does."""
        others = [other for other in self.entry["events"] if other["kind"] == "collective_mismatch"]
        rank = event["rank"]
        if event.get("shape") is None and event["op"] == "REDUCE":
            return
        tag = f"[rank{rank}]: " if self.version >= 2.02 else ""
        if self.version < 2:
            yield (
                f"{tag}RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running "
                f"inconsistent collective: {self.fingerprint(event)}"
            )
            return
        for other in sorted(others, key=lambda one: int(one["rank"])):
            if any(other.get(field) != event.get(field) for field in ("seq", "op", "shape", "dtype")):
                yield (
                    f"{tag}RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running "
                    f"collective: {self.fingerprint(event)}, but Rank {other['rank']} is running "
                    f"collective: {self.fingerprint(other)}.Collectives differ in the following aspects: \t "
                    f"Tensor Tensor shapes: {event.get('shape')}vs {other.get('shape')}"
                )
                return

    def desync_report(self, event: Event) -> Iterator[str]:
        rank = event["rank"]
        op, number = str(event["timeout_at"]).split(" #")
        last, missed = re.findall(r"#(\d+)", event["lagging_text"])
        yield f"{self._head(rank)}"
        yield f"\t - [{rank}] Timeout at collective: {op}, #{number}"
        yield "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:"
        yield (
            f"\t   - {event['lagging']} finished collective #{last}, but didn't join collective #{missed} "
            f"(count from 1)"
        )
        yield "\t - Snapshot of ranks' latest states:"
        for key, ranks in event["snapshot"].items():
            number, state, *rest = key.split()
            yield f"\t   #{number} {state} ranks:"
            yield f"\t     {ranks} {state} {rest[0] if rest else 'ALLREDUCE'}"

    def flight_recorder(self, event: Event) -> Iterator[str]:
        yield f"Collective sequence number: {event['seq']} has errors"
        yield f"collective: nccl:{event['op']}"
        state = str(event["note"]).split(",")[0]
        rows = [
            f"Culprit rank {rank}; Error type: {state}, Expected input sizes: '{event['expected']}' does not "
            f"match found input sizes: '{event['found']}'"
            for rank in event["culprit"]
        ]
        yield "error msg: " + ", ".join(rows)

    def python_exception(self, event: Event) -> Iterator[str]:
        for rank in self.ranks(event):
            tag = f"[rank{rank}]: " if rank is not None else ""
            name, note = str(event["type"]), str(event.get("note") or "")
            found = re.match(r"CUDA error: .*", name)
            if "setting up NCCL communicator" in note:
                key = re.search(r"waiting for key (\S+)", note)
                note = (
                    f"[{rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
                    f"key-value store by key '0', but store->get('0') got error: Timeout waiting for key: "
                    f"{key[1] if key else '0'} after 1800000 ms"
                )
            elif found:
                name, note = "RuntimeError", found[0]
            elif "detail-mode mismatch" in note:
                note = "Detected mismatch between collectives on ranks."
            elif "gloo" in note or note.startswith("same"):
                note = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4040"
            elif "internal error" in name or "nccl error" in name.lower():
                name, note = (
                    "RuntimeError",
                    f"NCCL error in: ProcessGroupNCCL.cpp:825, {name if name == 'internal error' else ''} {note}",
                )
            if not re.fullmatch(r"\w+", name):
                name, note = "RuntimeError", note or name
            yield f"{tag}Traceback (most recent call last):"
            yield f'{tag}  File "train.py", line 10, in main'
            yield f"{tag}{name}: {note}" if note else f"{tag}{name}"

    def nccl_warn(self, event: Event) -> Iterator[str]:
        text = str(event["text_summary"])
        for rank in self.ranks(event):
            tag = f"[rank{rank}]: " if rank is not None and self.version >= 2.02 else ""
            first = re.search(r"(?:error|status=) ?(\d+),? ", text) if "NET/IB" in text or "vendor" in text else None
            if first and "mismatch" not in text:
                peer = re.search(r"peer ([\d.]+)", text)
                vendor = re.search(r"vendor err (\d+)", text)
                yield (
                    f"{tag}node1:4000:4100 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion "
                    f"{f'from peer {peer[1]}<4791> ' if peer else ''}with error {first[1]}, opcode 1, len 0, "
                    f"vendor err {vendor[1] if vendor else 0}"
                )
                for more in re.findall(r"repeated status=(\d+)", text):
                    yield (
                        f"{tag}node1:4000:4100 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion "
                        f"with error {more}, opcode 1, len 0, vendor err 249"
                    )
            else:
                yield f"{tag}node1:4000:4100 [{rank or 0}] include/socket.h:361 NCCL WARN {text}"

    def nccl_info(self, event: Event) -> Iterator[str]:
        yield f"node1:4000:4100 [0] NCCL INFO {event['text_summary']}"

    def store_timeout(self, event: Event) -> Iterator[str]:
        limit = re.search(r"after (\d+)ms", str(event["note"]))
        for rank in self.ranks(event):
            peer = "SocketImpl(fd=79, addr=[localhost]:41170, remote=[localhost]:29500)"
            yield (
                f"[rank{rank}]:[W516 {self._clock()} socket.cpp:464] [c10d] waitForInput: poll for socket "
                f"{peer} returned 0, likely a timeout"
            )
            yield (
                f"[rank{rank}]:[W516 {self._clock()} socket.cpp:489] [c10d] waitForInput: socket {peer} timed "
                f"out after {limit[1] if limit else 300000}ms"
            )

    def gloo_timeout(self, event: Event) -> Iterator[str]:
        yield (
            f"RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:136] "
            f"{str(event['note']).split(' (')[0]}"
        )

    def progress(self, event: Event) -> Iterator[str]:
        note = str(event["note"])
        found = re.search(r"(\d+)% at (\d+:\d+)", note)
        steps = re.search(r"(\d+)(?:/| of )(\d+)", note)
        if found:
            yield (
                f"{note[: found.start()].strip()}:  {found[1]}%|#########    | {found[1]}/100 "
                f"[{found[2]}<10:00,  1.00s/it]"
            )
        elif steps:
            percent = 100 * int(steps[1]) // max(int(steps[2]), 1)
            yield f" {percent}%|###       | {steps[1]}/{steps[2]} [10:00<90:00,  1.37s/it]"
        else:
            yield note

    def exit(self, event: Event) -> Iterator[str]:
        signal = str(event.get("signal") or "")
        codes = {"SIGABRT": -6, "SIGSEGV": -11, "SIGKILL": -9}
        code = next((value for name, value in codes.items() if name in signal), event.get("code"))
        if "ray" in signal:
            yield (
                f"(raylet) A worker died or was killed while executing a task by an unexpected system error. "
                f"Worker exit type: SYSTEM_ERROR {event.get('note')}"
            )
            return
        for rank in self.ranks(event) if code is not None else []:
            yield f"  rank      : {rank} (local_rank: {rank})"
            yield f"  exitcode  : {code} (pid: 4100)"
            yield (
                f"  traceback : Signal {-int(code)} received by PID 4100"
                if int(code) < 0
                else "  traceback : To enable traceback see: the documentation"
            )

    def launcher_summary(self, event: Event) -> Iterator[str]:
        rank = event["first_observed_failure_rank"]
        yield "Root Cause (first observed failure):"
        yield "[0]:"
        yield f"  rank      : {rank} (local_rank: {rank})"
        yield f"  exitcode  : {event['exitcode']} (pid: 4100)"
        yield "  traceback : Signal 6 (SIGABRT) received by PID 4100"

    def kernel_log(self, event: Event) -> Iterator[str]:
        for number in event["xid"]:
            yield f"[ 5321.000001] NVRM: Xid (PCI:0000:3b:00): {number}, pid=4100, name=python"

    def deepspeed_trace_invalidated(self, event: Event) -> Iterator[str]:
        yield (
            f"Invalidate trace cache @ step {event['step']}: expected module {event['expected_module']}, but "
            f"got module {event['got_module']}"
        )

    def dataloader_warning(self, event: Event) -> Iterator[str]:
        yield str(event["note"])

    def stack(self, event: Event) -> Iterator[str]:
        yield from self._frame(None, str(event["at"]))


def render(entry: Mapping[str, Any]) -> str:
    """Return one merged log of an incident; facts that leave no line in a log (a plain "hang") leave none here."""
    renderer = Renderer(entry)
    lines = [f"loading, torch of this job: {entry['versions'].get('torch', 'unknown')}"]
    for event in entry["events"]:
        write: Callable[[Event], Iterator[str]] | None = getattr(renderer, event["kind"], None)
        if write is not None:
            lines.extend(write(event))
    return "\n".join(lines) + "\n"
