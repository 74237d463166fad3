"""`python -m belljar` is the `belljar` command."""

import os
import sys


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # the directory is gone, and nothing can be imported from it
        return None


# `-m` puts the current directory first on the import path. It may hold the very code that is not
# trusted, and a json.py there must not become ours. What Python has imported before this line is
# beyond us: the installed `belljar` command, or `python -P -m belljar`, has no such gap.
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", _here()):
    del sys.path[0]

from .cli import command  # noqa: E402

if __name__ == "__main__":
    command()
