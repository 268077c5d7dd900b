"""Errors of wrong calls: what was meant where a name was misspelt, or something else was given."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from ncclguard_explain.language import Message, joined, say, told, tr

P = ParamSpec("P")
R = TypeVar("R")


def meant(name: str, known: Collection[str], shown: str = "{}", alike: float = 0.6) -> Message | None:
    """Return the question whether a similar name was meant, None where none is similar; `shown`: how it is written.

    `alike`: the least ratio of difflib, from 0 to 1.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=alike)
    return tr("did you mean {name}?", name=shown.format(close[0])) if close else None


def no_argument(function: str, name: str, known: Collection[str]) -> TypeError:
    """Return the error of a call with an argument that a function does not have."""
    there = tr("there are {some}", some=", ".join(known))
    refused = tr("{name} has no argument {argument}", name=function, argument=repr(name))
    return TypeError(say(joined(": ", (refused, meant(name, known, "{}=") or there))))


def no_attribute(owner: object, name: str, hint: str) -> AttributeError:
    """Return the error for an attribute that an object does not have, with a hint at what to use instead, or ""."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{text}: {hint}" if hint else text, name=name, obj=owner)


def hinted(function: Callable[P, R]) -> Callable[P, R]:
    """Have calls of a function that misspell or lack an argument raise a TypeError that says which."""
    known = inspect.signature(function).parameters
    needed = [name for name, one in known.items() if one.default is inspect.Parameter.empty]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is not None:
                raise no_argument(function.__name__, unknown, known) from None
            without = [name for name in needed[len(args) :] if name not in kwargs]
            if without:
                text = told(
                    "{name} needs {some}: call {name}({all})",
                    name=function.__name__,
                    some=", ".join(without),
                    all=", ".join(needed),
                )
                raise TypeError(text) from None
            raise

    return call


def refuse_other(given: object, kind: str, instead: str, *needed: str) -> None:
    """Raise TypeError for what is none of a kind, such as its class, or the function under a bare decorator."""
    what = f"{given.__qualname__} is a class" if isinstance(given, type) else ""
    if not what and any(not hasattr(given, name) for name in needed):
        what = f"{getattr(given, '__qualname__', type(given).__name__)} is no {kind}"
    if what:
        raise TypeError(f"{what}: give the {kind} that the program has made, {instead}")
