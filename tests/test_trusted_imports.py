"""Belljar's late imports: never from what a run can write; the application's own as ever.

Each scene is a fresh interpreter started as a script in its project, so that the project comes
first on `sys.path`, and little is loaded before the first run.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar
from belljar import trusted_imports
from belljar.backends import registry
from belljar.testing.conformance.harness import writable_directory

ROOT = Path(belljar.__file__).parent
# Container engines are under the conformance suite, which has engines of its own.
BACKENDS = [name for name in registry.names() if name not in ("docker", "gvisor", "inprocess")]

# What every script starts with.
NOTED = """
import os, sys
def ran():
    try:
        return open(WITNESS + "/ran").read().split()
    except OSError:
        return []
"""

# The first run leaves a file for every module; what follows makes the host import all it ever does.
EVERYTHING = """
import sys
LEAVE = '''
for name in names:
    with open("p/" + name + ".py", "w") as file:
        file.write(text)
len(names)
'''
import belljar
from belljar.types import Mount
names = sorted(sys.stdlib_module_names) + ["numpy", "pandas", "pyarrow", "wasmtime", "yaml"]
first, others = sys.argv[1], sys.argv[1:]
wanted = dict(modules="any", mounts=[Mount(PROJECT, "p", "rw")])
text = f"open({WITNESS + '/'!r} + __name__, 'w').close()\\nraise ImportError"
runner = belljar.create_runner(**wanted)
left = runner.execute(LEAVE, {"names": names, "text": text}, backend=first)
assert left.value == len(names), left
before = sys.path[:]
for backend in others:
    packages = backend != "wasm"
    for code, kind in (
        ("import decimal; decimal.Decimal('1.5')", "Decimal"),
        ("import fractions; fractions.Fraction(1, 3)", "Fraction"),
        ("import uuid; uuid.UUID(int=1)", "UUID"),
        ("import datetime; datetime.date(2024, 2, 29)", "date"),
        ("import numpy; numpy.arange(3)", "ndarray" if packages else None),
        ("import pandas; pandas.DataFrame({'a': [1]})", "DataFrame" if packages else None),
        ("import os; os.kill(os.getpid(), 9)", None),
        ("display([1]); open('made', 'w').write('x'); 1 / 0", None),
        ("import nothing_of_this_name", None),
    ):
        for settle in ("now", "later"):
            result = runner.execute(code, backend=backend, memory="4G", outputs=["*"],
                                    settle=settle, retry=True)
            assert kind is None or type(result.value).__name__ == kind, (backend, code, result)
            repr(result), result.to_dict(), result.success
            [file.text for file in result.files.values()]
from belljar import doctor, Engine
import belljar.api
belljar.api.run("1")
[belljar.__dict__.get(name) or getattr(belljar, name) for name in belljar.__all__]
runner.engine.explain(belljar.Request(code="1"))
runner.close()
assert sys.path == before
import os
assert os.listdir(WITNESS) == [], os.listdir(WITNESS)
# The control arm: an import of the application's own finds what is there.
sys.modules.pop("fractions", None)
try:
    import fractions
except ImportError:
    pass
assert os.listdir(WITNESS) == ["fractions"]
"""


class Scene:
    """A project that is mounted writable, and the host program in it."""

    def __init__(self, top: Path) -> None:
        self.project, self.witness = top / "project", top / "witness"
        for place in (self.project, self.witness):
            place.mkdir()
            place.chmod(0o777)

    def run(self, code: str, *words: str) -> str:
        given = f"PROJECT, WITNESS = {str(self.project)!r}, {str(self.witness)!r}\n"
        script = self.project / "app.py"
        script.write_text(given + NOTED + textwrap.dedent(code) + "\nprint('to the end')\n")
        done = subprocess.run(
            [sys.executable, str(script), *words], cwd=self.project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said, mark, rest = done.stdout.rpartition("to the end\n")
        assert (mark, rest) == ("to the end\n", ""), done.stdout
        return said

    def leave(self, name: str, text: str = "") -> None:
        """A module that says when it is executed."""
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        witness = f"open({str(self.witness / 'ran')!r}, 'a').write(__name__ + ' ')\n"
        path.write_text(witness + textwrap.dedent(text))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with writable_directory(None) as top:
        yield Scene(top)


def available(name: str) -> bool:
    backend = registry.load(name)
    try:
        return backend.probe().available
    finally:
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", BACKENDS)
def test_no_run_makes_the_host_import_what_an_earlier_run_left(scene: Scene, first: str) -> None:
    if not available(first):
        pytest.skip(f"{first} is not available")
    others = [name for name in BACKENDS if name != first and available(name)]
    scene.run(EVERYTHING, first, *others[:2])


def test_a_package_that_lies_in_a_writable_directory_is_a_warning_and_not_executed(
    scene: Scene,
) -> None:
    scene.leave("lib/numpy/__init__.py", "ndarray = int")
    scene.run(
        """
        from belljar import trusted_imports
        from belljar.guest import protocol
        from belljar.report import Report
        sys.path[:] = [PROJECT + "/lib", *(p for p in sys.path if "site-packages" not in p)]
        def report():
            wire = protocol.dumps({"$": "ndarray", "v": {"dtype": "|u1", "shape": [0], "data": ""}})
            made = Report()
            made.feed(protocol.encode(protocol.VALUE, wire))
            return made
        trusted_imports.note_writable([PROJECT])
        made = report()
        assert made.value is None and ran() == []
        assert "numpy" in made.warnings[0] and "could write" in made.warnings[0], made.warnings
        # The control arm, which is also the other half of the rule: loaded before, it is used.
        import numpy
        assert ran() == ["numpy"]
        assert "empty" in report().warnings[0] or "malformed" in report().warnings[0]
        """
    )


def test_a_library_that_breaks_while_it_is_imported_is_a_warning(scene: Scene) -> None:
    (scene.project / "lib").mkdir()
    (scene.project / "lib" / "fractions.py").write_text("raise RuntimeError('half installed')")
    scene.run(
        """
        from belljar.guest import protocol
        from belljar.report import Report
        sys.path.insert(0, PROJECT + "/lib")
        made = Report()
        wire = protocol.dumps({"$": "fraction", "v": [1, 2]})
        made.feed(protocol.encode(protocol.VALUE, wire))
        assert made.value is None and "half installed" in made.warnings[0], made.warnings
        """
    )


@pytest.mark.parametrize(
    ("left", "noted", "first"),
    [
        ("fractions.py", "", ""),
        ("fractions.py", "fractions.py", ""),  # a single file that is mounted
        ("fractions/__init__.py", "fractions", ""),  # below an entry of sys.path
        ("lib/fractions.py", "", "lib"),  # above one
        ("lib/fractions.py", "lib/../lib", "link"),  # by another name
        ("lib/fractions.py", "link", "lib"),
        ("fractions.py", "", "."),
        ("fractions.py", "", "CURRENT"),
    ],
)
def test_what_can_be_written_is_known_by_any_of_its_names(
    scene: Scene, left: str, noted: str, first: str
) -> None:
    scene.leave(left, "raise ImportError")
    (scene.project / "link").symlink_to("lib")
    entry = "''" if first == "CURRENT" else "'.'" if first == "." else f"PROJECT + '/' + {first!r}"
    scene.run(
        f"""
        from belljar import trusted_imports
        from belljar.guest import values
        sys.path[0] = {entry}
        before = sys.path[:]
        trusted_imports.note_writable([PROJECT + "/" + {noted!r}])
        sys.modules.pop("fractions", None)
        number = values.decode({{"$": "fraction", "v": [1, 2]}})
        assert str(number) == "1/2" and ran() == [] and sys.path == before
        sys.modules.pop("fractions", None)
        try:
            import fractions
        except ImportError:
            pass
        assert ran() == ["fractions"]
        """
    )


def test_a_link_in_a_writable_directory_is_not_followed_wherever_it_leads(scene: Scene) -> None:
    """A run can put another link in its place after it has been looked at."""
    outside = scene.witness.parent / "outside"
    outside.mkdir()
    (outside / "linked.py").write_text("")
    (scene.project / "link").symlink_to(outside)
    (scene.witness.parent / "leads").symlink_to(scene.project / "link")
    scene.run(
        """
        from belljar import trusted_imports
        above = os.path.dirname(PROJECT)
        places = [PROJECT + "/link", above + "/leads", PROJECT + "/../project/link", "link"]
        files = [place + "/linked.py" for place in places]
        assert not any(map(trusted_imports.is_writable, files))  # the control arm, and cached
        trusted_imports.note_writable([PROJECT])
        assert all(map(trusted_imports.is_writable, files))
        assert not trusted_imports.is_writable(above + "/outside/linked.py")
        """
    )


def test_modules_in_an_archive_and_parts_of_namespaces_are_withheld(scene: Scene) -> None:
    scene.leave("spread/inner.py")
    scene.run(
        """
        import zipfile
        from belljar import trusted_imports
        with zipfile.ZipFile(PROJECT + "/lib.zip", "w") as archive:
            archive.writestr("zipped.py", f"open({WITNESS + '/ran'!r}, 'w').write('zipped')")
        sys.path.insert(0, PROJECT + "/lib.zip")
        trusted_imports.note_writable([PROJECT])
        ours = {"__name__": "belljar.test", "__builtins__": __builtins__}
        for name in ("zipped", "spread", "spread.inner", "json.nothing_there"):
            try:
                exec(f"import {name}", ours)
            except ImportError:
                continue
            raise SystemExit(f"{name} was imported")
        assert ran() == []
        import spread.inner, zipped  # the control arm
        assert ran() == ["zipped"], ran()
        """
    )


def test_the_application_imports_from_its_project_also_in_callbacks_and_threads(
    scene: Scene,
) -> None:
    for name in ("in_callback", "in_sink", "in_thread", "lately"):
        scene.leave(f"{name}.py")
    out = scene.run(
        """
        import sys, threading
        import belljar
        from belljar.types import Mount
        def hear(text):
            import in_callback
        def sink(event):
            import in_sink
        def work():
            import in_thread
        engine = belljar.Engine(sinks=[sink])
        runner = belljar.create_runner(
            engine=engine, modules="any", mounts=[Mount(PROJECT, "p", "rw")], backend="subprocess"
        )
        assert runner.execute("print(1)", on_stdout=hear).success
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        import lately
        runner.close()
        print(*sorted(open(WITNESS + "/ran").read().split()))
        """
    )
    assert out.split() == ["in_callback", "in_sink", "in_thread", "lately"]


def test_a_planted_distribution_names_no_backend(scene: Scene) -> None:
    planted = scene.project / "planted-1.0.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (planted / "entry_points.txt").write_text("[belljar.backends]\nplanted = planted:Backend\n")
    scene.run(
        """
        from belljar import trusted_imports
        from belljar.backends import registry
        assert "planted" in registry.names()  # the control arm: before any run could write there
        trusted_imports.note_writable([PROJECT])
        assert "planted" not in registry.names() and "jail" in registry.names()
        """
    )


def test_belljar_inside_a_writable_mount_is_loaded_before_the_first_run(scene: Scene) -> None:
    target = scene.project / "lib" / "belljar"
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns("__pycache__", "*.wasm*"))
    scene.run(
        """
        import sys
        sys.path.insert(0, PROJECT + "/lib")
        import belljar
        assert belljar.__file__.startswith(PROJECT)
        belljar.run
        from belljar import trusted_imports
        trusted_imports.note_writable([PROJECT])
        before = set(sys.modules)
        import os
        spoilt = f"open({WITNESS + '/ran'!r}, 'w').close()"
        for directory, _, files in os.walk(PROJECT + "/lib/belljar"):
            for name in files:
                if name.endswith(".py") and "/linux" not in directory and "/guest" not in directory:
                    open(directory + "/" + name, "w").write(spoilt)
        result = belljar.run("import decimal; decimal.Decimal(1)", backend="inprocess",
                             modules="any", level="permissive")
        assert result.success and str(result.value) == "1", result
        repr(result), result.to_dict()
        assert not os.path.exists(WITNESS + "/ran")
        """
    )


def test_a_mount_that_holds_belljar_is_a_warning_and_another_one_is_not(scene: Scene) -> None:
    shutil.copytree(
        ROOT, scene.project / "lib" / "belljar", ignore=shutil.ignore_patterns("__pycache__")
    )
    scene.run(
        """
        sys.path.insert(0, PROJECT + "/lib")
        from belljar import Engine
        from belljar.testing.fake import FakeBackend
        from belljar.types import Mount, Request
        def warnings(source, mode):
            with Engine(backends={"fake": FakeBackend()}) as engine:
                request = Request(code="1", mounts=(Mount(source, "p", mode),))
                return engine.run(request, backend="fake").warnings
        assert warnings(WITNESS, "rw") == () == warnings(PROJECT, "ro")
        (warning,) = warnings(PROJECT, "rw")
        assert PROJECT in warning and "install Belljar outside" in warning
        (again,) = warnings(PROJECT, "rw")
        assert again == warning
        """
    )


def test_many_directories_that_come_and_go_are_not_remembered_for_ever(tmp_path: Path) -> None:
    code = """
        import os, sys
        from belljar import trusted_imports
        kept = sys.argv[1] + "/kept"
        os.mkdir(kept)
        trusted_imports.note_writable([kept])
        for number in range(3000):
            path = f"{sys.argv[1]}/{number}"
            os.mkdir(path)
            trusted_imports.note_writable([path])
            assert trusted_imports.is_writable(path)
            os.rmdir(path)
        assert trusted_imports.is_writable(kept + "/x.py")
        assert not trusted_imports.is_writable(sys.argv[1])
        print(len(trusted_imports.noted()))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 1100


# Not the host's: what runs inside, in helper processes, or beside a test.
_NOT_HOST = (
    "guest/agent", "guest/worker", "guest/displays", "guest/failures", "wasm/inside",
    "wasm/worker", "testing", "cli/bench", "linux/zygote", "linux/landlock_zygote",
)  # fmt: skip
# Third parties', and the interpreter's own extension modules, which come from where it is built.
_OTHERS = {"numpy", "pandas", "polars", "pyarrow", "wasmtime", "yaml", "_json", "_socket",
           "binascii", "msvcrt", "importlib", "bokeh"}  # fmt: skip


def late_imports() -> Iterator[tuple[str, str]]:
    """(place, module) of every import inside a function of the host's side."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(_NOT_HOST):
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                else:
                    continue
                yield from ((f"{relative}:{node.lineno}", name) for name in names)


def test_every_late_import_of_the_standard_library_is_in_the_list() -> None:
    known = {*trusted_imports.DECODERS, *trusted_imports.LATE, *_OTHERS}
    assert len(set(late_imports())) > 30
    missing = {f"{place}: {name}" for place, name in late_imports()
               if name not in known and name.partition(".")[0] not in _OTHERS}  # fmt: skip
    assert not missing, sorted(missing)
