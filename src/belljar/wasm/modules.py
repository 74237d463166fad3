"""Which modules the Python guest has, and which of them are hollow: imported, but of no use there.

`tests/wasm` asks the guest itself, and keeps the list true.
"""

from __future__ import annotations

PRESENT = frozenset(
    """
    __future__ abc annotationlib argparse array ast asyncio atexit base64 bdb binascii bisect
    builtins cProfile calendar cmath cmd code codecs codeop collections colorsys compileall
    compression concurrent configparser contextlib contextvars copy copyreg csv dataclasses
    datetime dbm decimal difflib dis doctest email encodings enum errno faulthandler filecmp
    fileinput fnmatch fractions ftplib functools gc genericpath getopt getpass gettext glob
    graphlib gzip hashlib heapq hmac html http imaplib importlib inspect io ipaddress itertools
    json keyword linecache locale logging mailbox marshal math mimetypes modulefinder
    multiprocessing netrc ntpath nturl2path numbers opcode operator optparse os pathlib pdb pickle
    pickletools pkgutil platform plistlib poplib posix posixpath pprint profile pstats py_compile
    pyclbr pydoc pydoc_data pyexpat queue quopri random re reprlib rlcompleter runpy sched secrets
    select selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3
    sre_compile sre_constants sre_parse stat statistics string stringprep struct subprocess
    symtable sys sysconfig tabnanny tarfile tempfile textwrap threading time timeit token tokenize
    tomllib trace traceback tracemalloc types typing unicodedata unittest urllib uuid warnings wave
    weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zlib zoneinfo
    """.split()  # noqa: SIM905 - a list of words reads better without a hundred quotation marks
)
# Of packages that are there, the parts that are not.
ABSENT_BELOW = frozenset((
    "compression.bz2", "compression.lzma", "compression.zstd", "concurrent.interpreters",
    "dbm.gnu", "dbm.ndbm",
))  # fmt: skip
# There, and of no use: what it would take is absent. Also single functions of useful modules.
HOLLOW = {
    **dict.fromkeys(
        ("threading", "_thread", "concurrent.futures", "asyncio.to_thread"), "threads"
    ),
    **dict.fromkeys(
        ("multiprocessing", "subprocess", "asyncio.create_subprocess_exec",
         "asyncio.create_subprocess_shell",
         *(f"os.{name}" for name in (
             "execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe", "fork",
             "forkpty", "kill", "killpg", "pipe", "popen", "posix_spawn", "posix_spawnp", "spawnl",
             "spawnv", "spawnve", "system", "wait", "waitpid",
         ))),
        "processes",
    ),
    **dict.fromkeys(
        ("socket", "socketserver", "http.server", "xmlrpc.server", "wsgiref.simple_server",
         "asyncio.open_connection", "asyncio.start_server"),
        "sockets",
    ),
    "signal": "signals",
}  # fmt: skip


def lacks(name: str) -> str:
    """What a program that uses `name` (a module, or a member of one) would miss; "" if nothing."""
    parts = name.split(".")
    if parts[0] not in PRESENT and parts[0] not in HOLLOW:
        return f"module {parts[0]!r}"
    for length in range(1, len(parts) + 1):
        part = ".".join(parts[:length])
        if part in ABSENT_BELOW:
            return f"module {part!r}"
        if part in HOLLOW:
            return f"{HOLLOW[part]} ({part})"
    return ""


def importable(name: str) -> bool:
    """Whether `import name` succeeds in the guest, as far as the name alone tells."""
    parts = name.split(".")
    return parts[0] in PRESENT and ".".join(parts[:2]) not in ABSENT_BELOW
