"""What the source of a Python program suggests to have ready for it: a guess, for speed only.

The guess chooses between equally closed sandboxes: which modules a fork server has imported, and
whether a run gets a new network namespace with sockets or a kept one without. No protection and
nothing that runs share depends on it. A wrong guess costs time, or a socket that is refused, so
whatever is not known to need no sockets gets them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..records import positional_record, replace

if TYPE_CHECKING:
    from ..types import Request

# A smaller process forks faster: a program that names nothing gets a bare one.
STANDARD_MODULES = (
    "collections", "contextlib", "dataclasses", "datetime", "enum", "functools", "itertools",
    "json", "math", "operator", "random", "re", "string", "threading", "time", "traceback",
    "typing",
)  # fmt: skip
DATA_MODULES = ("numpy", "pandas", "matplotlib")
# On top of those, the one with the other: so there are few kinds of fork servers.
PLOT_MODULES = ("matplotlib.pyplot",)
SCIENCE_MODULES = (*PLOT_MODULES, "scipy.stats", "sklearn.linear_model", "sklearn.model_selection")
_PLOTS = frozenset(("seaborn",))
_SCIENCE = frozenset(("scipy", "sklearn", "statsmodels"))
# Other libraries that take long to import and start no thread by it, without which a fork server
# could not fork: it gets those that programs of late have named.
LEARNED = frozenset((
    "PIL", "altair", "bs4", "jinja2", "lxml", "networkx", "openpyxl", "plotly", "pyarrow",
    "pydantic", "requests", "seaborn", "sqlalchemy", "statsmodels", "sympy", "yaml",
))  # fmt: skip
_RECENT, _TIMES, _MOST_LEARNED = 32, 2, 4
# Modules whose values a context may hold, and what a program does with such a value.
_VALUES = frozenset(("numpy", "pandas", "pyarrow"))
# Without sockets these are of little use; importing them takes longer than the rest of a run.
SOCKET_MODULES = ("logging", "selectors", "socket", "subprocess", "tempfile")
SERVER_MODULES = (*SOCKET_MODULES, "asyncio", "concurrent.futures", "http.client", "urllib.request")
# Programs that name one of these get the larger set.
_SERVERS = frozenset((
    "aiohttp", "anyio", "asyncio", "concurrent", "fastapi", "flask", "ftplib", "grpc", "http",
    "httpx", "imaplib", "poplib", "requests", "smtplib", "ssl", "starlette", "tornado", "twisted",
    "urllib", "urllib3", "uvicorn", "websockets", "wsgiref", "xmlrpc", "zmq",
))  # fmt: skip
_DATA = frozenset((*DATA_MODULES, "pyarrow"))
# In every interpreter, or so small that it does not matter.
_ALWAYS_THERE = frozenset(("builtins", "gc", "itertools", "math", "os", "sys", "time"))
# Neither importing nor using these makes a socket.
_WITHOUT_SOCKETS = frozenset((
    *STANDARD_MODULES, *DATA_MODULES, *_ALWAYS_THERE,
    "__future__", "_thread", "abc", "argparse", "array", "ast", "base64", "binascii", "bisect",
    "bz2", "calendar", "cmath", "codecs", "colorsys", "configparser", "copy", "csv", "decimal",
    "difflib", "dis", "errno", "faulthandler", "fnmatch", "fractions", "getopt", "glob",
    "graphlib", "gzip", "hashlib", "heapq", "hmac", "html", "inspect", "io", "ipaddress",
    "keyword", "linecache", "locale", "logging", "lzma", "mimetypes", "numbers", "pathlib",
    "pickle", "pprint", "pyarrow", "queue", "reprlib", "resource", "secrets", "shelve", "shlex",
    "shutil", "signal", "sqlite3", "stat", "statistics", "struct", "symtable", "tarfile",
    "tempfile", "textwrap", "token", "tokenize", "tomllib", "tracemalloc", "types", "unicodedata",
    "unittest", "uuid", "warnings", "weakref", "xml", "zipfile", "zlib", "zoneinfo",
))  # fmt: skip
# Nor does anything of these read what the machine is like.
_WITHOUT_MACHINE = _WITHOUT_SOCKETS | frozenset((
    "asyncio", "concurrent", "contextvars", "ctypes", "email", "ftplib", "http", "imaplib",
    "poplib", "sched", "select", "selectors", "smtplib", "socket", "socketserver", "ssl", "urllib",
    "wsgiref", "xmlrpc", "zipimport",
))  # fmt: skip
_IMPORT = re.compile(r"^\s*(?:import|from)\s+([\w.]+(?:\s*,\s*[\w.]+)*)", re.MULTILINE)
# Imports that the pattern above does not find, programs in strings, and other programs.
_WORD = re.compile(r"\bimport\b")
_ANYTHING = re.compile(
    r"__import__|import_module|__builtins__|__subclasses__|__loader__|__spec__"
    r"|\b(?:exec\w*|eval|(?<!re\.)compile|system|popen|posix_spawnp?|spawn\w*|modules)\b"
)


# Nor does anything of these start threads, or tell how many to start.
_WITHOUT_THREADS = frozenset(STANDARD_MODULES) - {"threading"} | _ALWAYS_THERE - {"os"}
_MACHINE = re.compile(r"/proc\b|\bproc\b|create_subprocess")
# One look at a program that has none of all that, as most short ones.
_NOTABLE = re.compile(
    r"import|__|exec|eval|compile|system|popen|spawn|modules|proc|create_subprocess|pyplot"
)


@positional_record
class Warmth:
    """`preload`: modules that the fork server should have; `sockets`: whether to allow any;
    `machine`: whether /proc has files about the machine, not of processes alone; `cores`: whether
    it sees as many processors as it may use."""

    preload: tuple[str, ...]
    sockets: bool
    machine: bool
    cores: bool


_PLAIN = Warmth(preload=(), sockets=False, machine=False, cores=False)


class Recent:
    """What a backend's last programs have named, of `LEARNED`. One kind of fork server has all that
    several of them did: memory stays bounded, and few kinds take turns."""

    def __init__(self) -> None:
        self._named: tuple[frozenset[str], ...] = ()
        self._learned: tuple[str, ...] = ()

    def of_request(self, request: Request) -> Warmth:
        """As the function of the module, with what was learned if the program names any of it."""
        warm = of_request(request)
        if not warm.preload:
            return warm
        named = LEARNED & _imported(request.code or "")
        # A caller in another thread may undo this: then the program is forgotten, nothing else.
        self._named = (*self._named[1 - _RECENT :], named)
        if not named:
            return warm
        if not named <= {*self._learned}:
            self._learn()
        if named.isdisjoint(self._learned):
            return warm
        return replace(warm, preload=(*warm.preload, *self._learned))

    def _learn(self) -> None:
        recent = self._named
        times = {name: sum(name in named for named in recent) for name in LEARNED}
        often = sorted(times, key=lambda name: (-times[name], name))[:_MOST_LEARNED]
        self._learned = tuple(sorted(name for name in often if times[name] >= _TIMES))


def of_request(request: Request) -> Warmth:
    """What a Python program may want, and the modules that come with it."""
    code, more, data = request.code or "", False, False
    if request.files:
        more = any(name.endswith(".py") for name in request.files)
    if request.context:
        kinds = {type(value).__module__.partition(".")[0] for value in request.context.values()}
        data = not kinds.isdisjoint(_VALUES)
    if not (more or data or _NOTABLE.search(code)):
        return _PLAIN
    return of_source(code, more, data=data)


def of_source(code: str, more: bool = False, *, data: bool = False) -> Warmth:
    """What a Python program may want; `more` says that there is more of it to be read, and `data`
    that it is given a table or an array."""
    found = _IMPORT.findall(code)
    modules = {name.strip() for names in found for name in names.split(",")}
    named = {name.partition(".")[0] for name in modules}
    hidden = more or len(_WORD.findall(code)) > len(found) or _ANYTHING.search(code) is not None
    sockets = (
        hidden
        or not named <= _WITHOUT_SOCKETS
        or any(name.startswith("logging.") for name in modules)  # it has handlers that send
    )
    preload: tuple[str, ...] = ()
    if named - _ALWAYS_THERE:
        preload = STANDARD_MODULES
    if not named.isdisjoint(_SERVERS):
        preload += SERVER_MODULES
    elif not named.isdisjoint(SOCKET_MODULES):
        preload += SOCKET_MODULES
    if data and not preload:
        preload = STANDARD_MODULES
    science = not named.isdisjoint(_SCIENCE)
    plots = not named.isdisjoint(_PLOTS) or "pyplot" in code
    if data or science or plots or not named.isdisjoint(_DATA):
        preload += DATA_MODULES
    if science:
        preload += SCIENCE_MODULES
    elif plots:
        preload += PLOT_MODULES
    machine = hidden or not named <= _WITHOUT_MACHINE or _MACHINE.search(code) is not None
    cores = hidden or machine or data or not named <= _WITHOUT_THREADS
    return Warmth(preload, sockets, machine, cores)


def imports_data_modules(code: str) -> bool:
    """Whether the program seems to import one of the large libraries for data."""
    return not _imported(code).isdisjoint((*DATA_MODULES, "pyarrow"))


def _imported(code: str) -> set[str]:
    """The top-level modules that its import statements name."""
    found = _IMPORT.findall(code)
    return {name.strip().partition(".")[0] for names in found for name in names.split(",")}
