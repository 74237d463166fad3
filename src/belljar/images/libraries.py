"""Shared libraries: those that a program or an extension module loads, as `ldd` names them.

`ldd` starts the dynamic loader on the file, so it is only for files that this host trusts.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

from ..errors import BackendUnavailable
from .tree import Tree, normal

_LINE = re.compile(r"^\t(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_BATCH = 200  # files per call of ldd


def add_libraries(tree: Tree, files: Iterable[str], *, besides: Iterable[str] = ()) -> None:
    """Put every library that `files` load into `tree`, where an image's loader finds it without a
    cache: at its own path below /usr/lib, or directly in /usr/lib. Those below one of `besides`
    travel with the package they belong to and stay out."""
    inside = tuple(os.path.realpath(directory) + "/" for directory in besides)
    for name, path in sorted(loaded_by(files)):
        if os.path.realpath(path).startswith(inside):
            continue
        place = normal(path)
        if not place.startswith(("usr/lib/", "usr/lib64/", "usr/libx32/", "usr/lib32/")):
            place = f"usr/lib/{name}"
        tree.copy(path, place)


def loaded_by(files: Iterable[str]) -> set[tuple[str, str]]:
    """(name the loader asks for, path it finds) of every library that `files` load."""
    todo = sorted(set(files))
    found: set[tuple[str, str]] = set()
    for start in range(0, len(todo), _BATCH):
        try:
            answer = subprocess.run(
                ["ldd", *todo[start : start + _BATCH]],
                env={"PATH": os.defpath, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
        except FileNotFoundError:
            raise BackendUnavailable(
                "this host has no `ldd`: an image cannot be made from its files",
                fix="belljar images build --from-dockerfile, or build on a glibc Linux",
            ) from None
        # A status of 1 only says that some file was not dynamic: scripts, static programs.
        for match in _LINE.finditer(answer.stdout):
            path = match.group(2)
            found.add((match.group(1) or os.path.basename(path), path))
    return found
