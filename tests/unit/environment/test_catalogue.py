"""Each name in the catalogue is one that the installed torch, or the stated NCCL or torch, reads."""

from __future__ import annotations

import functools
import mmap
import re
from pathlib import Path

import pytest
import torch

from ncclguard.environment import catalogue
from ncclguard.environment.catalogue import (
    CATALOGUE,
    UNREAD_VARIABLES,
    Kind,
    Reader,
    Variable,
    closest,
    lookup,
    name_for,
)
from ncclguard.environment.nccl_names import NCCL_NAMES
from ncclguard.environment.setup import check_names
from ncclguard.environment.versions import Versions, detect_versions, parse_version, within

_DATA = Path(__file__).parent / "data"
_TORCH = Path(torch.__file__).parent
_PREFIXES = ("TORCH_", "GLOO_", "NCCL_")
_REST = re.compile(rb'[A-Z0-9_]+(?:\0|")')
_NEWEST = Versions(torch="2.13.0", nccl="2.29.7", nccl_source="test")
_OF_TORCH = [v for v in CATALOGUE.values() if v.reader in (Reader.TORCH, Reader.GLOO, Reader.TORCH_NCCL)]


def recorded(name: str) -> frozenset[str]:
    """The strings found in a published wheel, one a line."""
    return frozenset((_DATA / name).read_text().split("\n")[2:])


@functools.cache
def texts() -> frozenset[bytes]:
    """What the libraries of the installed torch hold from such a prefix to the end of the string, and the byte before it."""
    found = set()
    for library in (_TORCH / "lib").glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for prefix in map(str.encode, _PREFIXES):
                place = content.find(prefix)
                while place >= 0:
                    if rest := _REST.match(content, place):
                        found.add(content[place - 1 : rest.end()])
                    place = content.find(prefix, place + 1)
    return frozenset(found)


def installed(name: str, *, whole: bool = False) -> bool:
    """Whether the installed torch holds the name: in a library, in a header that comes with it or in its Python code.

    Linkers store a string that ends another one in that (NCCL_X in TORCH_NCCL_X), so only `whole` looks at what precedes.
    """
    assert name.startswith(_PREFIXES)
    needle = name.encode()
    string = (b"\0" if whole else b"") + needle + b"\0"
    if any(text.endswith(string) or text == b'"%b"' % needle for text in texts()) or in_header(name):
        return True
    return any(f'"{name}"' in code.read_text() for code in (_TORCH / "distributed").glob("*.py"))


def in_header(name: str) -> bool:
    """Whether a header of the installed torch names the variable."""
    headers = (_TORCH / "include/torch/csrc/distributed/c10d").glob("*.hpp")
    return any(f'"{name}"' in header.read_text() for header in headers)


@pytest.mark.parametrize("variable", _OF_TORCH, ids=lambda variable: variable.name)
def test_the_installed_torch_has_each_name_that_is_said_to_be_read(variable: Variable) -> None:
    """By version of the installed torch; in a build without NCCL, names in ProcessGroupNCCL.cpp are not to be found."""
    versions = detect_versions()
    if not variable.is_read(versions):
        of_another_backend = variable.not_by_nccl2 and versions.nccl2
        assert of_another_backend or not within(versions.torch, variable.since, variable.until)
        return
    if variable.reader is Reader.TORCH_NCCL and versions.nccl is None and not installed(variable.name):
        assert variable.name in recorded("torch-2.13.0-cuda.strings")
        return
    assert installed(variable.name)


@pytest.mark.parametrize("variable", _OF_TORCH, ids=lambda variable: variable.name)
def test_torch_2_13_with_cuda_has_each_name_that_is_said_to_be_read(variable: Variable) -> None:
    """And none of those that are said to be gone."""
    strings = recorded("torch-2.13.0-cuda.strings")
    found = variable.name in strings
    if not found and f"TORCH_{variable.name}" in strings:
        found = in_header(variable.name)  # the linker stores a string that is the end of another one only once
    assert found == variable.is_read(_NEWEST)


def test_nccl_2_29_7_has_each_name_that_is_said_to_be_read() -> None:
    """All 267 NCCL names against the strings of the library that torch 2.13 brings."""
    strings = recorded("libnccl-2.29.7.strings")
    said = {name for name, (since, until) in NCCL_NAMES.items() if within("2.29.7", since, until)}
    # In the source of 2.29.7, but under a condition that this build does not meet.
    assert said - strings == {"NCCL_IPC_USE_ABSTRACT_SOCKET"}
    gone = {name for name, (_, until) in NCCL_NAMES.items() if until and parse_version(until) < (2, 29, 7)}
    assert not gone & strings


@pytest.mark.parametrize("variable", UNREAD_VARIABLES, ids=lambda variable: variable.name)
def test_nothing_holds_the_names_that_are_said_to_be_read_by_nothing(variable: Variable) -> None:
    """Neither the published libraries nor the installed torch."""
    assert variable.name not in recorded("torch-2.13.0-cuda.strings") | recorded("libnccl-2.29.7.strings")
    assert not installed(variable.name, whole=True)  # libtorch_python of 2.15 has _DEFAULT_PG_NCCL_TIMEOUT
    pattern = re.compile(rf"(environ|getenv)[^\n]*\b{variable.name}\b")
    assert not any(pattern.search(path.read_text()) for path in (_TORCH / "distributed").rglob("*.py"))
    assert variable.instead


def test_entries_are_complete() -> None:
    """One sentence, a source, and versions that can be compared."""
    for name, variable in CATALOGUE.items():
        assert name == variable.name
        assert variable.sentence.endswith("."), name
        assert variable.source, name
        for version in (variable.since, variable.until):
            assert version is None or parse_version(version)
        assert (variable.replaced_by is None) == (variable.deprecated_since is None), name
        assert variable.replaced_by is None or variable.replaced_by in CATALOGUE
        assert (variable.kind is Kind.CHOICE) == bool(variable.choices), name


def test_the_docs_are_what_the_catalogue_says() -> None:
    """Run python -m ncclguard.environment.catalogue docs/environment.md after a change."""
    page = (Path(__file__).parents[3] / "docs/environment.md").read_text()
    assert page == catalogue.with_tables(page)
    assert all(f"`{name}`" in page for name in CATALOGUE)


@pytest.mark.parametrize(
    ("torch_version", "name", "expected"),
    [
        ("2.13.0", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("2.7.1", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.2.2", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("2.1.2", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        ("2.1.2", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", None),
    ],
)
def test_the_name_that_a_version_reads(torch_version: str, name: str, expected: str | None) -> None:
    """New names for new versions, old ones for old versions."""
    assert name_for(name, Versions(torch=torch_version, nccl=None, nccl_source="test")) == expected


def test_a_misspelling_is_recognised_and_a_stranger_is_not() -> None:
    """Two letters off, and the variable of a plug-in."""
    assert closest("NCCL_SOCKT_IFNAME", _NEWEST) == "NCCL_SOCKET_IFNAME"
    assert closest("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", _NEWEST) is None
    assert lookup("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY") is None
    assert lookup("NCCL_MIN_NCHANNELS") is not None


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "maybe", True),
        ("TORCH_NCCL_BLOCKING_WAIT", "Yes", False),
        ("NCCL_IB_TIMEOUT", "32", True),
        ("NCCL_IB_TIMEOUT", "22", False),
        ("NCCL_IB_TIMEOUT", "22s", True),
        ("TORCH_DISTRIBUTED_DEBUG", "verbose", True),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", False),
        ("NCCL_SOCKET_IFNAME", "anything", False),
    ],
)
def test_values_that_the_reader_would_refuse(name: str, value: str, fault: bool) -> None:
    """A boolean that is none makes torch raise in the constructor of the process group."""
    assert (CATALOGUE[name].fault_of(value) is not None) == fault


def test_what_nccl2_does_not_heed_is_not_recommended_and_is_warned_of_where_it_is_set() -> None:
    """torch 2.15 has another backend under the name of "nccl"."""
    legacy = Versions(torch="2.15.0", nccl="2.30.7", nccl_source="test")
    nccl2 = legacy.model_copy(update={"nccl2": True})
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    assert name_for(name, legacy) == name
    assert name_for(name, nccl2) is None
    assert check_names({name: "600", "TORCH_DIST_USE_NCCL2": "0"}, legacy) == []
    (finding,) = check_names({name: "600", "TORCH_DIST_USE_NCCL2": "1"}, nccl2)
    assert "nccl2" in finding.detail
    assert "TORCH_DIST_USE_NCCL2=0" in finding.advice
