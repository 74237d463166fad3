"""Docker, WebAssembly and the hybrid of both: `execute_code` on a project, answered with a dict.

    sandbox = HybridSandbox()
    sandbox.execute_code("print(open('data.txt').read())", "./my_project")["stdout"]

The project is mounted read-write, and a program starts in it: at `/app` in containers, and at
`/mnt/project` in WebAssembly.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from .. import log
from ..api import Runner, build_request, create_runner
from ..config import Settings, load
from ..errors import BackendUnavailable, BelljarError, Partial
from ..types import Mount, Result, Status
from . import _answers

APP, MNT_PROJECT = "/app", "/mnt/project"
FUEL = 400_000_000
MEMORY = "512M"
# A memory of 512 MB without swap, one processor, no network; no list of modules, at any level.
_LIMITS: dict[str, Any] = {"memory": MEMORY, "cpus": 1, "network": "off", "modules": "any"}
_HEAVY = frozenset(("numpy", "torch", "tensorflow", "pandas", "scipy", "sklearn"))


class Answer(dict[str, Any]):
    """The dict that the document describes; beside it the whole `result`, if there is one."""

    result: Result | None = None
    warnings: tuple[str, ...] = ()


class DockerSandbox:
    """Runs programs in containers made from `image`.

    An image that the engine lacks is pulled. If that fails, the images built from this host are
    used, which `Answer.warnings` and the log say. BackendUnavailable if there are none either, or
    if there is neither an engine nor a backend that isolates as well.
    """

    def __init__(
        self, image: str = "python:3.11-slim", *, settings: Settings | None = None
    ) -> None:
        settings = settings or load()
        self._runner = create_runner(backend="docker", settings=settings)
        self.image, self.warnings = _obtained(image, settings)
        engine = self._runner.engine
        # Raises what is wrong now, instead of with every program.
        engine.plan(build_request(code="", image=self.image, settings=settings), backend="docker")

    def execute_code(
        self,
        code_string: str,
        project_path: str | os.PathLike[str],
        timeout: float = 30,
        *,
        require_libraries: Iterable[str] = (),
    ) -> Answer:
        """Run Python code with `project_path` at `/app`, which is where it starts.

        The answer's keys are `status` (success, error, timeout, system_failure), `stdout`,
        `stderr`, `exit_code` and `execution_time_ms`. Raises nothing that has to do with the run.
        """
        began = time.monotonic()
        try:
            result = self._runner.execute(
                code_string,
                timeout=timeout,
                image=self.image,
                mounts=[_project(project_path, APP)],
                workdir=APP,
                require_libraries=require_libraries,
                **_LIMITS,
            )
        except (BelljarError, OSError) as error:
            return _failed(error, began)
        status = {Status.SUCCESS: "success", Status.TIMEOUT: "timeout"}.get(result.status, "error")
        answer = Answer(
            status=status,
            stdout=result.stdout,
            stderr=_answers.stderr(result),
            exit_code=_answers.exit_code(result),
            execution_time_ms=_milliseconds(began),
        )
        answer.result, answer.warnings = result, (*self.warnings, *result.warnings)
        return answer

    def close(self) -> None:
        self._runner.close()


class WasmSandbox:
    """Runs Python code in WebAssembly, with 400 million instructions at most.

    Belljar brings its own CPython: a `wasm_binary_path` is only checked to be there.
    """

    def __init__(
        self,
        wasm_binary_path: str | os.PathLike[str] | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        if wasm_binary_path is not None:
            if not os.path.exists(wasm_binary_path):
                raise FileNotFoundError(
                    f"there is no WebAssembly binary at {os.fspath(wasm_binary_path)!r}; Belljar "
                    "needs none: leave wasm_binary_path out"
                )
            log.warning("Belljar runs the CPython that it was built with, not wasm_binary_path")
        self._runner = create_runner(backend="wasm", settings=settings or load(), fallback=False)
        found = self._runner.engine.backend("wasm").probe()
        if not found.available:
            raise BackendUnavailable(f"no WebAssembly here: {found.reason}", fix=found.fix)

    def execute_code(
        self, code_string: str, project_mount_path: str | os.PathLike[str] | None = None
    ) -> Answer:
        """Run Python code; `project_mount_path`, if given, is at `/mnt/project`, where it starts.

        The answer's keys are `status` (success, error, fuel_exhausted), `stdout`, `stderr`,
        `fuel_consumed` and `execution_time_ms`. FileNotFoundError for a project that is not there.
        """
        began = time.monotonic()
        shown: dict[str, Any] = {}
        if project_mount_path is not None:
            shown = {"mounts": [_project(project_mount_path, MNT_PROJECT)], "workdir": MNT_PROJECT}
        try:
            result = self._runner.execute(code_string, fuel=FUEL, **shown, **_LIMITS)
        except BelljarError as error:
            answer = _failed(error, began)
            del answer["exit_code"]
            return answer_with(answer, status="error", fuel_consumed=0)
        known = (Status.SUCCESS, Status.FUEL_EXHAUSTED)
        answer = Answer(
            status=result.status.value if result.status in known else "error",
            stdout=result.stdout,
            stderr=_answers.stderr(result),
            fuel_consumed=result.usage.fuel or 0,
            execution_time_ms=_milliseconds(began),
        )
        answer.result, answer.warnings = result, result.warnings
        return answer

    def close(self) -> None:
        self._runner.close()


class HybridSandbox:
    """WebAssembly for pure Python, containers for programs that need libraries.

    Which one a program needs is the engine's choice (`prefer="isolation"`), from its imports. With
    no container engine those programs run in the jail, with a warning.
    """

    def __init__(
        self,
        wasm_binary_path: str | os.PathLike[str] | None = None,
        *,
        image: str = "python:3.11-slim",
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or load()
        self._image = image
        self.wasm_sandbox = WasmSandbox(wasm_binary_path, settings=self._settings)
        self._docker: DockerSandbox | None = None
        self._chooser: Runner = create_runner(prefer="isolation", settings=self._settings)

    @property
    def docker_sandbox(self) -> DockerSandbox:
        """Made when a program first needs it: an image may have to be pulled."""
        if self._docker is None:
            self._docker = DockerSandbox(self._image, settings=self._settings)
        return self._docker

    def execute_code(
        self,
        code_string: str,
        project_path: str | os.PathLike[str],
        require_libraries: bool | Iterable[str] = False,
    ) -> Answer:
        """Run Python code on what suits it; the answer also has `backend`.

        `require_libraries` sends it to a container: True, or names that it must be able to import.
        """
        if require_libraries or self._needs_libraries(code_string):
            names = () if isinstance(require_libraries, bool) else require_libraries
            answer = self.docker_sandbox.execute_code(
                code_string, project_path, require_libraries=names
            )
        else:
            answer = self.wasm_sandbox.execute_code(code_string, project_path)
        return answer_with(answer, backend=answer.result.backend if answer.result else None)

    def _needs_libraries(self, code_string: str) -> bool:
        from .. import needs

        if not _HEAVY.isdisjoint(needs.of_python(code_string).modules):
            return True
        engine = self._chooser.engine
        try:
            request = build_request(code=code_string, prefer="isolation", settings=engine.settings)
            return engine.plan(request, wishes={"modules": "any"}, backend="auto").backend != "wasm"
        except BelljarError:
            return False  # the run itself says what is wrong

    def close(self) -> None:
        self.wasm_sandbox.close()
        self._chooser.close()
        if self._docker is not None:
            self._docker.close()


def check_sandbox_health(sandbox: Any = None) -> bool:
    """Whether a real program runs: `print("OK")` on `sandbox`, or on a new HybridSandbox.

    What is wrong is logged as an error to the logger `belljar`.
    """
    import tempfile

    with contextlib.ExitStack() as cleanup:
        try:
            if sandbox is None:
                sandbox = cleanup.enter_context(contextlib.closing(HybridSandbox()))
            project = cleanup.enter_context(tempfile.TemporaryDirectory())
            answer = sandbox.execute_code('print("OK")', project)
        except (BelljarError, OSError) as error:
            log.error(f"the sandbox is not healthy: {error}")
            return False
    if answer["status"] != "success" or answer["stdout"].strip() != "OK":
        log.error(f"the sandbox is not healthy: {answer['status']}: {answer['stderr']}")
        return False
    return True


def _obtained(image: str, settings: Settings) -> tuple[str | None, tuple[str, ...]]:
    """(the image or None for Belljar's own, warnings). Without an engine it is the run that falls
    back, and warns."""
    from ..docker_api import connect
    from ..images import obtain

    try:
        api = connect(settings.docker_host)
    except BackendUnavailable:
        return None, ()
    got = obtain.obtain(api, image, settings.ceiling, _say)
    if got.warning:
        log.warning(got.warning)
    return got.image, (got.warning,) if got.warning else ()


def answer_with(answer: Answer, **changes: Any) -> Answer:
    answer.update(changes)
    return answer


def _project(path: str | os.PathLike[str], at: str) -> Mount:
    """FileNotFoundError or NotADirectoryError unless `path` is a directory."""
    os.scandir(path).close()
    return Mount(os.path.abspath(path), at, "rw")


def _failed(error: Exception, began: float) -> Answer:
    partial = (error.partial if isinstance(error, BelljarError) else None) or Partial()
    return Answer(
        status="system_failure",
        stdout=partial.stdout,
        stderr=f"{partial.stderr}{error}",
        exit_code=_answers.SYSTEM_FAILURE,
        execution_time_ms=_milliseconds(began),
    )


def _milliseconds(began: float) -> int:
    return int((time.monotonic() - began) * 1000)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
