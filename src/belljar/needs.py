"""What a program needs from the place it runs in, as far as reading its source tells.

A Python program is parsed once: which modules it imports and which of their members it touches. An
import that stands under `except ImportError` or `TYPE_CHECKING` is not needed. Where the name of an
import, or the text given to `exec`, can only be known by running the program, the answer is
`unreadable`, and whoever chooses a place has to be careful.

This is for choosing well, not for safety: a wrong guess costs a failed run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from . import lint
from .records import positional_record

_IMPORT_CALLS = frozenset({"__import__", "import_module"})
_TEXT_CALLS = frozenset({"exec", "eval", "compile"})
# Modules that import, or run, whatever they are told to.
_IMPORTERS = frozenset(
    {"code", "codeop", "imp", "importlib.machinery", "importlib.util", "runpy", "zipimport"}
)
_GUARDS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_MOST_TEXTS = 20  # programs in strings of the program, all together
_MOST_KEPT = 1 << 16  # characters of a program whose answer is kept


@positional_record
class Needs:
    """Dotted names of modules and members, in order; `unreadable` says why there may be more."""

    names: tuple[str, ...] = ()
    unreadable: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The top-level modules."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.names))


def of_python(code: str, files: Mapping[str, bytes] | None = None) -> Needs:
    """What a Python program and the Python files that come with it need from elsewhere."""
    sources = {path: data for path, data in (files or {}).items() if path.endswith(".py")}
    if not sources:
        return _kept(code) if len(code) <= _MOST_KEPT else _read(code)
    own = {path.split("/")[0].removesuffix(".py") for path in sources}
    parts = [_read(code), *(_read(lint.decoded(data)) for data in sources.values())]
    names = dict.fromkeys(name for part in parts for name in part.names)
    return Needs(
        tuple(name for name in names if name.partition(".")[0] not in own),
        next((part.unreadable for part in parts if part.unreadable), ""),
    )


# What Node.js gives a program and QuickJS does not. In a comment it counts as well: no harm done.
_NODE = re.compile(
    r"\b(require|import|export|process|Buffer|fetch|Worker|WebSocket|__dirname|__filename"
    r"|setImmediate|TextEncoder|TextDecoder|URL|crypto|performance|structuredClone|Intl)\b"
)


def of_node(code: str) -> str:
    """The first thing in a JavaScript program that only Node.js has; "" if it names none."""
    found = _NODE.search(code)
    return found[1] if found else ""


def _read(code: str) -> Needs:
    try:
        tree = lint.parse(code)
        if tree is None:
            return Needs(unreadable="this Python cannot parse it")
        return _Reading().read(tree)
    except (RecursionError, MemoryError):
        return Needs(unreadable="it is too large or too deeply nested to be read")
    except ValueError as error:
        return Needs(unreadable=str(error))


_kept = lru_cache(maxsize=64)(_read)


class _Reading:
    """One program on its way through; nothing here recurses over what the program nests."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.meaning: dict[str, str] = {}
        self.unreadable = ""
        self.texts = 0

    def read(self, tree: ast.Module) -> Needs:
        programs = [tree]
        while programs:
            nodes = list(_needed(programs.pop()))
            for node in nodes:
                self._learn(node)
            called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
            for node in nodes:
                programs += self._look(node, called)
        return Needs(tuple(self.names), self.unreadable)

    def _learn(self, node: ast.AST) -> None:
        """Imports, and what names they give to what."""
        match node:
            case ast.Import(names=names):
                for alias in names:
                    self._need(alias.name)
                    top = alias.name.partition(".")[0]
                    self.meaning[alias.asname or top] = alias.name if alias.asname else top
            case ast.ImportFrom(module=str() as module, names=names, level=0):
                for alias in names:
                    full = module if alias.name == "*" else f"{module}.{alias.name}"
                    self._need(full)
                    self.meaning[alias.asname or alias.name] = full

    def _look(self, node: ast.AST, called: Mapping[int, ast.Call]) -> Iterator[ast.Module]:
        """Members that are touched, and imports by call; yields programs found in strings."""
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=member) if name in self.meaning:
                self._need(f"{self.meaning[name]}.{member}")
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in _TEXT_CALLS or name == "__import__":
                power = name
            case ast.Name(id=name) if self.meaning.get(name, "").endswith(".import_module"):
                power = "import_module"
            case ast.Attribute(attr=name) if name in _IMPORT_CALLS:
                power = name
            case _:
                return
        call = called.get(id(node))
        text = lint.first_argument(call) if call is not None else None
        if text is None:
            self._unreadable(f"what {power} is given is only known when it runs")
        elif power in _IMPORT_CALLS:
            self._need(text)
        elif self.texts >= _MOST_TEXTS:
            self._unreadable("it holds many programs in strings")
        else:
            self.texts += 1
            inner = lint.parse(text)
            if inner is not None:
                yield inner

    def _need(self, name: str) -> None:
        self.names.setdefault(name)
        if name in _IMPORTERS or name.rpartition(".")[0] in _IMPORTERS:
            self._unreadable(f"{name} imports what it is told to")

    def _unreadable(self, why: str) -> None:
        self.unreadable = self.unreadable or why


def _needed(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node but those that the program can do without."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        skipped: list[ast.stmt] = []
        if isinstance(node, ast.Try) and any(map(_catches, node.handlers)):
            skipped = [part for part in node.body if isinstance(part, ast.Import | ast.ImportFrom)]
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            skipped = node.body
        without = set(map(id, skipped))
        children = [child for child in ast.iter_child_nodes(node) if id(child) not in without]
        waiting += reversed(children)


def _catches(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in _GUARDS) for kind in kinds
    )


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"
