"""Known holes in images, as Trivy or Grype finds them: whichever of the two is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..docker_api import Api
from ..errors import BackendFailed, BackendUnavailable
from ..records import plain, record

SEVERITIES = ("critical", "high", "medium", "low", "unknown")
SCANNERS = ("trivy", "grype")
_SECONDS = 1800.0  # the first scan fetches a database
_MOST_BYTES = 256 << 20


@record
class Finding:
    id: str
    severity: str
    package: str
    version: str
    fixed: str = ""


@record
class Scan:
    """What a scanner said of one image; `digest` is the content that was scanned."""

    image: str
    digest: str
    scanner: str
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(finding.severity for finding in self.findings)
        return {severity: found[severity] for severity in SEVERITIES if found[severity]}

    def reaches(self, severity: str) -> bool:
        """Whether there is a finding of `severity` or above."""
        worst = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return any(finding.severity in worst for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        findings = [plain(finding) for finding in self.findings]
        return {**plain(self), "findings": findings, "counts": self.counts}


def scanner() -> tuple[str, str]:
    """(name, path) of the installed scanner; BackendUnavailable says how to get one."""
    for name in SCANNERS:
        if path := shutil.which(name):
            return name, path
    raise BackendUnavailable(
        "neither trivy nor grype is installed",
        fix="install one: https://trivy.dev or https://github.com/anchore/grype",
    )


def scan(api: Api, image: str) -> Scan:
    """Have the scanner look at `image`, as the engine has it. BackendFailed if it cannot."""
    name, path = scanner()
    digest = str(api.json("GET", f"/images/{image}/json")["Id"])
    words = {
        "trivy": [path, "image", "--quiet", "--scanners", "vuln", "--format", "json", image],
        "grype": [path, f"docker:{image}", "--quiet", "--output", "json"],
    }[name]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            env={**os.environ, "DOCKER_HOST": f"unix://{api.path}"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendFailed(f"{path} did not scan {image!r}: {error}") from error
    said = done.stderr.decode("utf-8", "replace").strip()[-500:]
    if done.returncode != 0:
        raise BackendFailed(f"{path} ended with {done.returncode}: {said}")
    if len(done.stdout) > _MOST_BYTES:
        raise BackendFailed(f"the report of {path} is too long")
    try:
        report = json.loads(done.stdout)
        found = tuple((_of_trivy if name == "trivy" else _of_grype)(report))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackendFailed(f"the report of {path} cannot be read: {error!r}; {said}") from error
    return Scan(image=image, digest=digest, scanner=name, findings=found)


def _of_trivy(report: Any) -> Iterator[Finding]:
    for result in report.get("Results") or ():
        for each in result.get("Vulnerabilities") or ():
            yield Finding(
                id=str(each["VulnerabilityID"]),
                severity=_severity(each.get("Severity")),
                package=str(each.get("PkgName", "")),
                version=str(each.get("InstalledVersion", "")),
                fixed=str(each.get("FixedVersion", "")),
            )


def _of_grype(report: Any) -> Iterator[Finding]:
    for match in report["matches"]:
        hole, artifact = match["vulnerability"], match["artifact"]
        yield Finding(
            id=str(hole["id"]),
            severity=_severity(hole.get("severity")),
            package=str(artifact.get("name", "")),
            version=str(artifact.get("version", "")),
            fixed=", ".join(map(str, (hole.get("fix") or {}).get("versions") or ())),
        )


def _severity(given: object) -> str:
    word = str(given).lower()
    return {"negligible": "low"}.get(word, word if word in SEVERITIES else "unknown")
