"""`belljar images scan`: what a scanner says becomes a verdict. The scanner here says what it is
told to, because neither Trivy nor Grype is ours; the engine and its images are real."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER, Engine

from belljar import cli
from belljar.images import names

pytestmark = TOGETHER

TRIVY = {"Results": [
    {"Target": "debian", "Vulnerabilities": [
        {"VulnerabilityID": "CVE-1", "Severity": "HIGH", "PkgName": "zlib",
         "InstalledVersion": "1.2", "FixedVersion": "1.3"},
        {"VulnerabilityID": "CVE-2", "Severity": "LOW", "PkgName": "bash"},
    ]},
    {"Target": "python"},
]}  # fmt: skip
GRYPE = {"matches": [
    {"vulnerability": {"id": "CVE-3", "severity": "Critical", "fix": {"versions": ["2.0"]}},
     "artifact": {"name": "openssl", "version": "1.1"}},
    {"vulnerability": {"id": "CVE-4", "severity": "Negligible"}, "artifact": {"name": "tar"}},
]}  # fmt: skip


@pytest.fixture
def scanner(docker_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a scanner on PATH, which notes how it was called."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(name: str, report: object, code: int = 0) -> Path:
        (tmp_path / "report").write_text(report if isinstance(report, str) else json.dumps(report))
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "$DOCKER_HOST $@" > {tmp_path}/called\n'
            f"cat {tmp_path}/report\necho trouble >&2\nexit {code}\n"
        )
        program.chmod(0o755)
        return tmp_path / "called"

    return install


def scan(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = cli.main(["images", "scan", *words, "--json"])
    told = capfd.readouterr()
    assert code in (0, 1), told
    return code, json.loads(told.out)


def test_trivys_findings_are_counted_and_the_digest_is_recorded(
    scanner: Any, docker_engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    called = scanner("trivy", TRIVY)
    code, told = scan(capfd, "python")
    (image,) = told["images"]
    assert (code, told["failed"]) == (0, 0)
    assert (image["image"], image["scanner"]) == (names.image_name("python"), "trivy")
    assert image["digest"].startswith("sha256:")
    assert image["counts"] == {"high": 1, "low": 1}
    assert image["findings"][0] == {
        "id": "CVE-1", "severity": "high", "package": "zlib", "version": "1.2", "fixed": "1.3",
    }  # fmt: skip
    words = called.read_text().split()
    assert words[0] == docker_engine.host and words[-1] == names.image_name("python")


def test_findings_of_the_named_severity_fail(
    scanner: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    scanner("trivy", TRIVY)
    assert scan(capfd, "python", "--fail-on", "high")[0] == 1
    assert scan(capfd, "python", "--fail-on", "critical")[0] == 0
    assert cli.main(["images", "scan", "python", "--fail-on", "much"]) == 125


def test_grype_is_used_where_there_is_no_trivy(
    scanner: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    scanner("grype", GRYPE)
    code, told = scan(capfd, "python")
    assert (code, told["failed"]) == (1, 1)
    assert told["images"][0]["counts"] == {"critical": 1, "low": 1}
    assert cli.main(["images", "scan", "python"]) == 1
    shown = capfd.readouterr()
    assert "scanning belljar/python" in shown.err
    assert "1 critical, 1 low" in shown.out and "failed" in shown.out


def test_without_names_all_of_our_images_are_scanned(
    scanner: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    scanner("trivy", {"Results": None})
    code, told = scan(capfd)
    assert code == 0 and names.image_name("python") in {each["image"] for each in told["images"]}


def test_what_goes_wrong_is_named(scanner: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["images", "scan", "python"]) == 127
    assert "trivy.dev" in capfd.readouterr().err
    scanner("trivy", TRIVY, 3)
    assert cli.main(["images", "scan", "python"]) == 125
    assert "ended with 3: trouble" in capfd.readouterr().err
    scanner("trivy", "no JSON")
    assert cli.main(["images", "scan", "python"]) == 125
    assert "cannot be read" in capfd.readouterr().err
    assert cli.main(["images", "scan", "no/such:1"]) == 127
    assert os.environ["PATH"].endswith("/bin")
