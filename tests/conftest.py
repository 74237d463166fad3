"""What all tests share: the soak switch, what keeps tests that run at the same time apart, and a
closing word on which backends were tested."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import container_engines
import hypothesis
import pytest

# How long an example takes says more about this machine's other work than about the example.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")

_CONFORMANCE = "test_conformance.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the long repetitions")


def pytest_configure(config: pytest.Config) -> None:
    """A process that runs a share of the tests has its own TMPDIR: leftovers are looked for there,
    and those of its neighbours are none."""
    # Tests press Ctrl-C, also where whoever started them ignores it, as a shell's background does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        return
    own = Path(tempfile.mkdtemp(prefix=""))  # short: names of sockets are made of it
    own.chmod(0o1777)  # tests that run as somebody else use it, too
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


@pytest.fixture(autouse=True)
def no_shared_runner_is_left() -> Iterator[None]:
    """What `belljar.run` keeps warm would be found by tests that look for leftovers."""
    yield
    api = sys.modules.get("belljar.api")
    if api is not None and api._runner is not None:
        api._runner.close()
        api._runner = None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _shares_a_module_fixture(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="a long repetition: --soak runs it"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist tells groups by the ends of names; without them it would not keep to them."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                pytest.exit("this pytest-xdist forms no groups with this pytest: run without -n", 4)


def _shares_a_module_fixture(item: pytest.Item) -> bool:
    """Such a test stays with the others of its file: what they share is made only once."""
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(made[-1].scope == "module" for made in fixtures)


@pytest.fixture(scope="session")
def docker_engine() -> container_engines.Engine:
    """The session's Docker Engine, with the python image."""
    return _engine("docker")


@pytest.fixture(scope="session")
def podman_engine() -> container_engines.Engine:
    """Podman's service for the session, with the python image."""
    return _engine("podman")


def _engine(name: str) -> container_engines.Engine:
    if reason := container_engines.why_not(name):
        pytest.skip(reason)
    return container_engines.session(name)


def pytest_unconfigure() -> None:
    container_engines.stop_session()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which backends the conformance suite ran on, and why each skip: green hides nothing."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            path, _, rest = report.nodeid.partition("::")
            if not path.endswith(_CONFORMANCE):
                continue
            backend = rest.split("::")[0].split("[")[0]
            counts[backend][outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons[backend][report.longrepr[2].removeprefix("Skipped: ")] += 1
    if not counts:
        return
    terminalreporter.section("backends under conformance")
    for backend in sorted(counts):
        told = ", ".join(f"{number} {outcome}" for outcome, number in counts[backend].items())
        terminalreporter.write_line(f"{backend}: {told}")
        for reason, number in reasons[backend].most_common():
            terminalreporter.write_line(f"    {number} skipped: {reason}")
