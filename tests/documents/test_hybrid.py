"""Document 000: `execute_code` on a project, in containers, in WebAssembly, and the hybrid."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER, Engine

from belljar import Settings
from belljar.compat import hybrid
from belljar.compat.hybrid import (
    DockerSandbox,
    HybridSandbox,
    WasmSandbox,
    check_sandbox_health,
)
from belljar.errors import BackendUnavailable
from belljar.images import names, store
from belljar.policy import Ceiling

pytestmark = TOGETHER

DOCKER_KEYS = {"status", "stdout", "stderr", "exit_code", "execution_time_ms"}
WASM_KEYS = {"status", "stdout", "stderr", "fuel_consumed", "execution_time_ms"}
IMAGE = "python:3.11-slim"
USES_THE_PROJECT = """
import os
import helper

print(os.getcwd(), helper.double(21), open("data.txt").read().strip())
with open(os.getcwd() + "/made.txt", "w") as file:
    file.write("by the program")
"""
NO_NETWORK = "import urllib.request; urllib.request.urlopen('http://192.0.2.1/', timeout=5)"


@pytest.fixture
def engine(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that has the documents' image: ours, by that name."""
    repository, _, tag = IMAGE.partition(":")
    own = names.image_name("python")
    docker_engine.api.json("POST", f"/images/{own}/tag", {"repo": repository, "tag": tag})
    monkeypatch.setenv("DOCKER_SOCKET_PATH", docker_engine.host)
    yield docker_engine
    store.remove(docker_engine.api, IMAGE)


@pytest.fixture
def docker(engine: Engine) -> Iterator[DockerSandbox]:
    sandbox = DockerSandbox()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def wasm() -> Iterator[WasmSandbox]:
    try:
        sandbox = WasmSandbox()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_SOCKET_PATH", f"unix://{tmp_path}/none.sock")


# -- containers


def test_a_container_runs_code_in_the_project(docker: DockerSandbox, project: Path) -> None:
    before = sorted(os.listdir(project))
    answer = docker.execute_code(USES_THE_PROJECT, str(project))
    assert answer["status"] == "success", answer
    assert answer.keys() == DOCKER_KEYS
    assert answer["stdout"] == "/app 42 from the project\n"
    assert (answer["stderr"], answer["exit_code"]) == ("", 0)
    assert isinstance(answer["execution_time_ms"], int) and answer["execution_time_ms"] > 0
    assert (project / "made.txt").read_text() == "by the program"
    assert sorted(set(os.listdir(project)) - {"made.txt"}) == before  # nothing of ours
    assert answer.result is not None and answer.result.backend == "docker"
    assert answer.result.usage.wall > 0 and docker.image == IMAGE


def test_the_documents_arguments_go_by_name_and_by_place(
    docker: DockerSandbox, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    by_name = docker.execute_code(
        code_string="print(1)", project_path=f"./{project.name}", timeout=20
    )
    assert by_name["stdout"] == "1\n"
    assert docker.execute_code("print(2)", project, 20)["stdout"] == "2\n"


def test_a_failing_program_is_an_error_with_its_exit_code(
    docker: DockerSandbox, project: Path
) -> None:
    answer = docker.execute_code("print('so far'); 1 / 0", str(project))
    assert (answer["status"], answer["exit_code"]) == ("error", 1)
    assert answer["stdout"] == "so far\n" and "ZeroDivisionError" in answer["stderr"]
    assert docker.execute_code("import sys; sys.exit(7)", str(project))["exit_code"] == 7


def test_a_loop_without_end_times_out_with_124_and_names_the_limit(
    docker: DockerSandbox, project: Path
) -> None:
    answer = docker.execute_code("print('on'); \nwhile True: pass", str(project), timeout=1)
    assert (answer["status"], answer["exit_code"]) == ("timeout", 124)
    assert answer["stdout"] == "on\n" and "1 s" in answer["stderr"]


def test_deleting_everything_deletes_what_is_in_the_project_only(
    docker: DockerSandbox, project: Path
) -> None:
    outside = project.parent / f"{project.name}-canary"
    outside.write_text("still here")
    try:
        code = "import os; os.system('rm -rf --no-preserve-root / 2>/dev/null')"
        answer = docker.execute_code(code, str(project))
        assert answer["status"] in ("success", "error")
        assert outside.read_text() == "still here"
        assert os.listdir(project) == []  # the control arm: it could delete what is its own
    finally:
        outside.unlink()
    assert docker.execute_code("print('again')", str(project))["stdout"] == "again\n"


def test_a_large_allocation_is_an_out_of_memory_answer(
    docker: DockerSandbox, project: Path
) -> None:
    answer = docker.execute_code("x = [0] * 10**9", str(project))
    assert answer["status"] == "error" and answer["exit_code"] != 0
    assert "MemoryError" in answer["stderr"] and "512 MiB" in answer["stderr"]
    # The control arm: what fits does not fail.
    assert docker.execute_code("x = [0] * 10**6", str(project))["status"] == "success"


def test_a_container_has_no_network_one_processor_and_no_swap(
    docker: DockerSandbox, project: Path
) -> None:
    answer = docker.execute_code(NO_NETWORK, str(project))
    assert answer["status"] == "error" and "URLError" in answer["stderr"]
    assert answer.result is not None
    held = answer.result.enforcement
    assert held["network"].state == held["memory"].state == held["cpus"].state == "enforced"


def test_the_container_is_removed(engine: Engine, project: Path) -> None:
    sandbox = DockerSandbox()
    assert sandbox.execute_code("print(1)", str(project))["status"] == "success"
    sandbox.close()
    assert engine.api.json("GET", "/containers/json", {"all": "1"}) == []


def test_a_project_that_is_not_there_is_a_system_failure(docker: DockerSandbox) -> None:
    answer = docker.execute_code("print(1)", "/nowhere/at/all")
    assert (answer["status"], answer["exit_code"]) == ("system_failure", -1)
    assert "/nowhere/at/all" in answer["stderr"]


def test_an_engine_that_goes_away_is_a_system_failure(
    docker: DockerSandbox, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise hybrid.BelljarError("the engine went away")

    monkeypatch.setattr(docker._runner, "execute", broken)
    answer = docker.execute_code("print(1)", str(project))
    assert answer.keys() == DOCKER_KEYS
    assert (answer["status"], answer["exit_code"]) == ("system_failure", -1)
    assert answer["stderr"] == "the engine went away"


def test_an_image_that_cannot_be_pulled_is_replaced_by_one_of_this_host_and_said(
    engine: Engine,
    project: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lost = "127.0.0.1:1/no/such:1"  # nothing listens on that port
    sandbox = DockerSandbox(image=lost)
    assert f"pulling {lost}" in capfd.readouterr().err
    answer = sandbox.execute_code("print(6 * 7)", str(project))
    sandbox.close()
    assert (answer["status"], answer["stdout"]) == ("success", "42\n")
    assert any(lost in text and "this host's files" in text for text in answer.warnings)
    assert any(lost in record.getMessage() for record in caplog.records)


def test_an_image_that_the_operator_does_not_list_is_refused(engine: Engine) -> None:
    settings = Settings(docker_host=engine.host, ceiling=Ceiling(images=(("belljar/*",),)))
    with pytest.raises(BackendUnavailable, match=r"ceiling\.images"):
        DockerSandbox(settings=settings)
    allowed = Settings(docker_host=engine.host, ceiling=Ceiling(images=(("python:3.*",),)))
    DockerSandbox(settings=allowed).close()  # the control arm


def test_without_an_engine_an_equal_backend_takes_over_with_a_logged_warning(
    no_engine: None, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = DockerSandbox()
    with caplog.at_level(logging.WARNING, "belljar"):
        answer = sandbox.execute_code(USES_THE_PROJECT, str(project))
    sandbox.close()
    assert answer["status"] == "success", answer
    assert answer["stdout"].startswith("/app 42")
    assert answer.result is not None and answer.result.isolation == "jail"
    assert any("'docker' could not be used" in text for text in answer.warnings)
    assert any("'docker' could not be used" in record.getMessage() for record in caplog.records)


def test_without_an_engine_and_without_an_equal_the_constructor_names_the_fix(
    no_engine: None,
) -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        DockerSandbox(settings=Settings(
            docker_host=os.environ["DOCKER_SOCKET_PATH"], fallback_enabled=False,
        ))  # fmt: skip
    assert refusal.value.fix


# -- WebAssembly


def test_wasm_runs_code_and_counts_fuel(wasm: WasmSandbox) -> None:
    answer = wasm.execute_code("print('Hello from WebAssembly!')")
    assert answer.keys() == WASM_KEYS
    assert (answer["status"], answer["stdout"]) == ("success", "Hello from WebAssembly!\n")
    assert isinstance(answer["fuel_consumed"], int) and 0 < answer["fuel_consumed"] < hybrid.FUEL
    assert isinstance(answer["execution_time_ms"], int)


def test_wasm_sees_the_project_at_mnt_project(wasm: WasmSandbox, project: Path) -> None:
    code = "open('/mnt/project/test.txt', 'w').write('Hello')"
    answer = wasm.execute_code(code, project_mount_path=str(project))
    assert answer["status"] == "success", answer
    assert (project / "test.txt").read_text() == "Hello"
    answer = wasm.execute_code(USES_THE_PROJECT, str(project))
    assert answer["stdout"] == "/mnt/project 42 from the project\n"


def test_a_loop_without_end_uses_up_400_million_instructions(wasm: WasmSandbox) -> None:
    answer = wasm.execute_code("while True: pass")
    assert answer["status"] == "fuel_exhausted"
    assert answer["fuel_consumed"] == 400_000_000
    assert "400" in answer["stderr"]


def test_wasm_has_no_network_and_at_most_512_megabytes(wasm: WasmSandbox) -> None:
    assert wasm.execute_code(NO_NETWORK)["status"] == "error"
    answer = wasm.execute_code("x = [0] * 10**9")
    assert answer["status"] == "error" and "MemoryError" in answer["stderr"]
    assert wasm.execute_code("x = [0] * 10**7")["status"] == "success"  # the control arm


def test_deleting_everything_in_wasm_stays_in_the_project(wasm: WasmSandbox, project: Path) -> None:
    outside = project.parent / f"{project.name}-canary"
    outside.write_text("still here")
    code = (
        "import os, shutil\n"
        "for name in ('data.txt', 'helper.py'): os.remove('/mnt/project/' + name)\n"
        f"for path in ('/', '/mnt/project/../', {str(outside)!r}):\n"
        "    shutil.rmtree(path, ignore_errors=True)\n"
    )
    try:
        assert wasm.execute_code(code, str(project))["status"] == "success"
        assert outside.read_text() == "still here" and os.listdir(project) == []
    finally:
        outside.unlink()


def test_a_binary_that_is_not_there_is_not_found(tmp_path: Path, wasm: WasmSandbox) -> None:
    with pytest.raises(FileNotFoundError, match=r"python\.wasm"):
        WasmSandbox(wasm_binary_path=str(tmp_path / "python.wasm"))
    (tmp_path / "python.wasm").write_bytes(b"")
    WasmSandbox(str(tmp_path / "python.wasm")).close()
    with pytest.raises(FileNotFoundError):
        wasm.execute_code("1", "/nowhere/at/all")


# -- the hybrid


@pytest.fixture
def mixed(engine: Engine, wasm: WasmSandbox) -> Iterator[HybridSandbox]:
    sandbox = HybridSandbox()
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    ("code", "libraries", "backend"),
    [
        ("print(sum(range(10)))", False, "wasm"),
        ("text = 'import numpy'; print(text)", False, "wasm"),
        ("try:\n    import numpy\nexcept ImportError:\n    pass", False, "wasm"),
        ("print(1)", True, "docker"),
        ("print(1)", ["json"], "docker"),
        ("import pandas", False, "docker"),
        ("from sklearn import svm", False, "docker"),
        ("def f():\n    import torch.nn as nn", False, "docker"),
    ],
)
def test_the_hybrid_takes_wasm_for_pure_python_and_containers_for_libraries(
    mixed: HybridSandbox, project: Path, code: str, libraries: Any, backend: str
) -> None:
    answer = mixed.execute_code(code, str(project), require_libraries=libraries)
    assert answer["backend"] == backend, answer
    assert answer.keys() == {*(WASM_KEYS if backend == "wasm" else DOCKER_KEYS), "backend"}


def test_a_required_library_that_is_nowhere_is_a_system_failure(
    mixed: HybridSandbox, project: Path
) -> None:
    answer = mixed.execute_code("print(1)", str(project), require_libraries=["no_such_library"])
    assert answer["status"] == "system_failure" and "no_such_library" in answer["stderr"]


def test_without_an_engine_libraries_are_used_in_the_jail_with_a_warning(
    no_engine: None, wasm: WasmSandbox, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = HybridSandbox()
    answer = sandbox.execute_code("import numpy; print(numpy.arange(4).sum())", str(project))
    sandbox.close()
    assert (answer["status"], answer["stdout"], answer["backend"]) == ("success", "6\n", "jail")
    assert any("'docker' could not be used" in text for text in answer.warnings)
    assert any("'docker' could not be used" in record.getMessage() for record in caplog.records)


def test_health_is_a_real_run(
    wasm: WasmSandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert check_sandbox_health() is True
    assert check_sandbox_health(wasm) is True

    class Ill:
        def execute_code(self, code: str, project: str) -> dict[str, str]:
            return {"status": "success", "stdout": "no\n", "stderr": ""}

    assert check_sandbox_health(Ill()) is False
    assert [record.levelname for record in caplog.records] == ["ERROR"]
