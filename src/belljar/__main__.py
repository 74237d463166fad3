"""`python -m belljar` is the `belljar` command."""

import os
import sys

# `-m` puts the current directory first on the import path. It may hold the very code that is not
# trusted, and a json.py there must not become ours.
if not sys.flags.safe_path and sys.path and os.path.abspath(sys.path[0] or ".") == os.getcwd():
    del sys.path[0]

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
