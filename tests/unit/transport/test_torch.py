"""The names that torch keeps to itself, in one process with a group of one."""

from __future__ import annotations

import ast
import inspect
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d as c10d

import ncclguard
from ncclguard import torch_compat
from ncclguard.torch_compat import groups, stores


def start() -> None:
    """The default group on a store like the one that ``init_method`` makes."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=torch_compat.PrefixStore("default_pg", store), rank=0, world_size=1)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start()
    group = dist.group.WORLD
    assert group is not None
    yield group
    if dist.is_initialized():
        dist.destroy_process_group()


def test_private_names_of_torch_are_in_the_package_for_them_only() -> None:
    """So that another version of torch is met in one place."""
    package = Path(ncclguard.__file__).parent
    files = [*package.rglob("*.py"), *(package.parent / "integrations").rglob("*.py")]
    found = [
        f"{file.relative_to(package.parent)}:{node.lineno}"
        for file in files
        if "torch_compat" not in file.parts
        for node in ast.walk(ast.parse(file.read_text()))
        if any(_private(name) for name in _names(node))
    ]
    assert len(files) > 100
    assert found == []


def _names(node: ast.AST) -> list[str]:
    """Dotted names that a node imports or looks up."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []


def _private(name: str) -> bool:
    first, *rest = name.split(".")
    return first in ("torch", "dist", "c10d") and any(part.startswith("_") and part[1:2] != "_" for part in rest)


def test_groups_are_described_while_they_live(world: dist.ProcessGroup) -> None:
    other = dist.new_group([0])
    assert torch_compat.known_groups() == (world, other)
    assert torch_compat.group_ranks(world) == (0,)
    assert torch_compat.group_name(world) != torch_compat.group_name(other)
    assert isinstance(torch_compat.gloo_backend(world), dist.ProcessGroupGloo)  # type: ignore[attr-defined]
    assert torch_compat.is_member(other)
    dist.destroy_process_group(other)
    assert not torch_compat.is_member(other)
    assert not torch_compat.is_member(dist.GroupMember.NON_GROUP_MEMBER)
    for ask in (torch_compat.group_name, torch_compat.group_ranks):
        with pytest.raises(ValueError, match="new_group"):
            ask(other)  # type: ignore[operator]


def test_a_thread_that_asks_for_another_group_at_the_same_time_changes_no_answer(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Last(tuple[object, ...]):
        """A group and its ranks; another thread leaves those of another group between a look at one and at the other."""

        def __getitem__(self, place: Any) -> Any:
            monkeypatch.setattr(groups, "_last_ranks", (object(), (7, 8)))
            return super().__getitem__(place)

    monkeypatch.setattr(groups, "_last_ranks", Last((c10d._world.pg_group_ranks[world], (0,))))
    assert torch_compat.group_ranks(world) == (0,)


def test_a_cloned_store_shares_the_keys_and_not_the_connection(world: dist.ProcessGroup) -> None:
    store = torch_compat.default_store()
    clone = torch_compat.clone_store(store)
    store.set("key", "value")
    assert clone.get("key") == b"value"
    waited: list[str] = []

    def wait() -> None:
        try:
            clone.wait(["never"], timedelta(seconds=60))
        except RuntimeError as error:
            waited.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    store.set("key", "2")  # not held up by the wait on the clone
    assert store.get("key") == b"2"
    assert torch_compat.disconnect(clone)
    thread.join(20)
    assert not thread.is_alive()
    assert waited
    assert store.get("key") == b"2"  # the other connection lives


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_stores_without_a_connection_are_cloned_too(kind: str, tmp_path: Path) -> None:
    base = dist.FileStore(str(tmp_path / "store"), 1) if kind == "file" else dist.HashStore()  # type: ignore[attr-defined]
    store = torch_compat.PrefixStore("prefix", base)
    clone = torch_compat.clone_store(store)
    store.set("key", "value")
    assert clone.get("key") == b"value"
    assert not torch_compat.disconnect(clone)


def test_the_fallback_for_torch_without_clone_finds_the_prefixes_of_init_process_group(
    world: dist.ProcessGroup,
) -> None:
    store = torch_compat.default_store()
    base: Any = torch_compat.base_store(store)
    store.set("key", "value")
    reopened = stores._reopen(store, base)
    assert reopened is not store
    assert reopened.get("key") == b"value"
    unknown = torch_compat.PrefixStore("a prefix of somebody else", store)
    assert stores._reopen(unknown, base) is unknown


def test_callbacks_run_once_after_init_and_before_destroy_and_cannot_break_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "_on_init", [])
    monkeypatch.setattr(groups, "_on_destroy", [])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    calls: list[str] = []

    def after() -> None:
        calls.append(f"init {dist.is_initialized()}")

    def before() -> None:
        calls.append(f"destroy {dist.is_initialized()}")

    def broken() -> None:
        raise RuntimeError("of the callback")

    for callback in (broken, after, after):
        torch_compat.on_init(callback)
    for callback in (broken, before, before):
        torch_compat.on_destroy(callback)
    assert dist.init_process_group is dist.distributed_c10d.init_process_group
    assert "backend" in inspect.signature(dist.init_process_group).parameters
    assert dist.init_process_group.__doc__
    start()
    other = dist.new_group([0])
    dist.destroy_process_group(other)
    dist.destroy_process_group()
    assert calls == ["init True", "destroy True"]
    assert len([record for record in caplog.records if "was skipped" in record.message]) == 2


@pytest.mark.parametrize("op", [ReduceOp.PREMUL_SUM, dist._make_nccl_premul_sum(2.0)])
def test_reduce_ops_are_named_in_both_forms(op: Any) -> None:
    assert torch_compat.reduce_op_name(op) == "PREMUL_SUM"


@pytest.mark.parametrize("op", ["SUM", None, 0, sum])
def test_what_is_no_reduce_op_is_a_type_error(op: object) -> None:
    with pytest.raises(TypeError, match="ReduceOp"):
        torch_compat.reduce_op_name(op)


def test_a_gloo_group_has_a_set_of_connections_for_each_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    group = torch_compat.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))  # type: ignore[attr-defined]
    assert torch_compat.gloo_contexts(group) == 2
    group.allreduce([torch.ones(1)]).wait()  # type: ignore[attr-defined]
