"""Files that a guest made, written below a directory of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..files.destination import Destination, NotWritten
from ..types import File


class Written:
    """The names that were written, and for each that was not, why."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.problems: dict[str, str] = {}


def write(
    files: Mapping[str, File], directory: str, *, globs: Iterable[str], force: bool = False
) -> Written:
    """Write every collected file below `directory`, which is made if it is missing."""
    done = Written()
    with Destination(directory, globs, replace=force) as destination:
        for name, file in files.items():
            if file.data is None:
                continue
            try:
                destination.write(name, file.data)
                done.names.append(name)
            except NotWritten as error:
                done.problems[name] = str(error)
                if error.exists:
                    done.problems[name] += "; overwrite with --force, or choose another --out-dir"
    return done
