"""One backend where the host has no privilege: no root, no control groups, one user id.

When the tests run as root, the package is copied to where everybody can read it, and another
interpreter runs it as another user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import belljar

NOBODY = 63992  # an id that no account and no other test has
SYSTEM_PYTHON = "/usr/bin/python3"
PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from belljar.backends import registry
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Mount, Request

engine = Engine(Settings(), backends={sys.argv[3]: registry.load(sys.argv[3])})

def run(code, level="standard", mounts=(), **wishes):
    wishes.setdefault("modules", "any")
    return engine.run(Request(code=code, mounts=mounts), level=level, wishes=wishes,
                      backend=sys.argv[3])

project = os.path.join(sys.argv[2], "project")
os.mkdir(project, 0o700)
planted = run(
    "import os\\n"
    "open('p/new', 'w').write('x')\\n"
    "try: open('p/.envrc', 'w').write('x'); planted = True\\n"
    "except OSError: planted = False\\n"
    "planted", mounts=(Mount(project, "p", "rw"),))
hog = "x = []\\nwhile True: x.append(bytearray(1 << 20))"
family = (
    "import os, time\\nfor _ in range(6):\\n    if os.fork() == 0:\\n"
    "        data = bytearray(b'x') * (100 << 20); time.sleep(30)\\ntime.sleep(10)")
forks = (
    "import os, signal\\nn = 0\\ntry:\\n    while n < 200:\\n        if os.fork() == 0:"
    " signal.pause()\\n        n += 1\\nfinally: print(n)")
loop = run(forks, processes=20)
answers = {
    "strict": run("6 * 7", level="strict").value,
    "states": sorted({held.state for held in run("1").enforcement.values()}),
    "identity": list(run("import os; (os.getpid(), os.getuid(), os.getgroups())").value[:2]),
    "hog": run(hog, memory="128M").status,
    "family": run(family, memory="256M").status,
    "forks": [loop.status, loop.limit_hit, int(loop.stdout) <= 20],
    "memfd": run(
        "import os\\ntry: os.memfd_create('x'); s = 'made'\\n"
        "except OSError: s = 'refused'\\ns").value,
    "spin": run("while True: pass", timeout=1, cpus=0.5).status,
    "affinity": run(
        "import os\\ntry: os.sched_setaffinity(0, range(os.cpu_count())); s = 'changed'\\n"
        "except OSError: s = 'refused'\\ns").value,
    "planted": planted.value,
    "project": sorted(os.listdir(project)),
}
engine.close()
print(json.dumps(answers))
"""

# What every jail answers.
EXPECTED = [
    ("strict", 42),
    ("states", ["enforced"]),
    ("hog", "oom"),
    ("family", "oom"),
    ("forks", ["limit", "pids", True]),
    ("memfd", "refused"),
    ("spin", "timeout"),
    ("affinity", "refused"),
    ("planted", False),
    ("project", ["new"]),
]


@contextmanager
def answers_of(backend: str, user: int = NOBODY) -> Iterator[dict[str, Any]]:
    directory = tempfile.mkdtemp(prefix="belljar-unprivileged-", dir="/var/tmp")
    python, before = sys.executable, []
    try:
        if os.geteuid() == 0:
            if not os.path.exists(SYSTEM_PYTHON):
                pytest.skip("no interpreter that another user could run")
            python = SYSTEM_PYTHON
            before = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            if shutil.which(before[0]) is None:
                pytest.skip("no setpriv here")
            os.chown(directory, user, user)
        package = Path(directory, "package", "belljar")
        shutil.copytree(Path(belljar.__file__).parent, package)
        Path(directory).chmod(0o755)
        done = subprocess.run(
            [*before, python, "-I", "-B", "-c", PROGRAM, str(package.parent), directory, backend],
            capture_output=True,
            text=True,
            timeout=280,
            env={},
            cwd="/",
        )
        if "BackendUnavailable" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)
    finally:
        shutil.rmtree(directory)
