"""Names of files below a work directory, and the patterns that select them."""

from __future__ import annotations

import fnmatch
import os
import sys

from ..errors import RequestError

# Guests speak UTF-8 whatever this process's locale is: a file's name is the same bytes for both.
_FOREIGN = sys.getfilesystemencoding() != "utf-8"


def name_on_disk(name: str) -> str:
    """What to call a file here that a guest calls `name`. UnicodeEncodeError if none can be."""
    if not _FOREIGN:
        os.fsencode(name)
        return name
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def name_in_guest(name: str) -> str:
    """What a guest calls a file that is called `name` here."""
    return os.fsencode(name).decode("utf-8", "surrogateescape") if _FOREIGN else name


def checked_name(where: str, name: object) -> str:
    """`name` as a relative path below the work directory, or RequestError."""
    if not isinstance(name, str) or not name:
        raise RequestError(where, f"{name!r} is not a file name")
    if "\0" in name:
        raise RequestError(where, "a file name contains a NUL byte")
    try:
        name_on_disk(name)
    except UnicodeEncodeError:
        problem = f"{name!r} has characters that no file name can have"
        raise RequestError(where, problem) from None
    parts = name.replace(os.sep, "/").split("/")
    if os.path.isabs(name) or ".." in parts or (os.name == "nt" and ":" in name):
        raise RequestError(where, f"{name!r} leaves the work directory", fix="use a relative path")
    clean = "/".join(part for part in parts if part not in ("", "."))
    if not clean:
        raise RequestError(where, f"{name!r} is not a file name")
    return clean


def matches(path: str, glob: str) -> bool:
    """Whether `glob` selects the file at `path`."""
    # "*.csv" means anywhere below, as in a .gitignore; a glob with a slash is anchored.
    return fnmatch.fnmatchcase(path if "/" in glob else path.rsplit("/", 1)[-1], glob)
