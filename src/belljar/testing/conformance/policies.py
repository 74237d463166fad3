"""Conformance: the enforcement report is true, complete, and what it lacks is refused."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ...backends.base import FIELDS, Backend
from ...errors import PolicyUnenforceable
from ...policy import Isolation
from ...types import Mount, Status
from .harness import Backed, Jar

ASKED: dict[str, Any] = {
    "timeout": 5,
    "memory": "256M",
    "cpus": 1,
    "processes": 20,
    "disk": "64M",
    "output": "64K",
    "value": "64K",
    "displays": "64K",
    "open_files": 64,
    "network": "off",
    "filesystem": {"hidden": ["/etc"]},
}


class Policies(Backed):
    def test_the_report_covers_every_field_and_is_in_the_result(self, jar: Jar) -> None:
        plan = jar.plan("1")
        assert set(FIELDS) <= set(plan.enforcement)
        for name, held in plan.enforcement.items():
            assert held.state in ("enforced", "best_effort", "absent"), name
            assert held.by.strip(), f"{name} does not say by what, or why not"
        result = jar.run("1")
        assert result.enforcement == plan.enforcement
        assert (result.backend, result.isolation) == (jar.backend.name, plan.isolation.value)
        assert plan.isolation is jar.backend.isolation

    def test_a_plan_is_pure(self, jar: Jar) -> None:
        policy, request = jar.plan("1", id="same").policy, jar.plan("1", id="same").request
        first = jar.backend.compile(policy, request)
        second = jar.backend.compile(policy, request)
        assert first == second
        assert (first.request, first.policy) == (request, policy)

    def test_a_disabled_layer_changes_the_report(self, jar: Jar) -> None:
        layers = tuple(getattr(jar.backend, "layers", ()))
        if not layers:
            pytest.skip(f"{jar.backend.name} has no layers to disable")
        told = {frozenset({a, b}): self.account(jar, {a, b}) for a in layers for b in layers}
        told[frozenset()] = self.account(jar, set())
        for layer in layers:
            # A layer may stand behind a stronger one: then it shows once that one is off too.
            behind = [frozenset(), *(frozenset({other}) for other in layers if other != layer)]
            shows = any(told[without] != told[without | {layer}] for without in behind)
            assert shows, f"{layer} is off and the report is the same"

    def account(self, jar: Jar, disable: set[str]) -> object:
        """The report without these layers, or the fields whose lack refuses every run."""
        backend = type(jar.backend)(disable=frozenset(disable))  # type: ignore[call-arg]
        weaker = self.make_jar(backend)
        try:
            return weaker.plan("1").enforcement
        except PolicyUnenforceable as refusal:
            return refusal.fields
        finally:
            weaker.engine.close()

    @pytest.mark.parametrize("field", FIELDS)
    def test_a_field_is_held_or_refused_when_it_is_asked_for(
        self, jar: Jar, open_dir: Path, field: str
    ) -> None:
        asked: dict[str, Any] = {field: ASKED.get(field)}
        if field == "mounts":
            asked = {"mounts": (Mount(str(open_dir), "shown", "ro"),)}
        try:
            plan = jar.plan("1", **asked)
        except PolicyUnenforceable as refusal:
            assert field in refusal.fields
            with pytest.raises(PolicyUnenforceable):
                jar.run("1", **asked)
            assert jar.run("1 + 1").value == 2  # the control arm: unasked, the program runs
        else:
            assert plan.enforcement[field].state != "absent"
            assert jar.run("1 + 1", **asked).value == 2

    @pytest.mark.parametrize("wanted", [{"level": "strict"}, {"min_isolation": "vm"}])
    def test_a_policy_past_the_backend_is_refused_by_name_and_nothing_starts(
        self, wanted: dict[str, Any]
    ) -> None:
        backend = Counting(self.make_backend())
        if not backend.probe().available:
            pytest.skip(f"{backend.name} is not available")
        jar = self.make_jar(backend)
        floor = Isolation.JAIL if "level" in wanted else Isolation.VM
        try:
            if backend.isolation.at_least(floor):
                assert jar.run("1 + 1", **wanted).value == 2
                return
            with pytest.raises(PolicyUnenforceable) as refusal:
                jar.run("print('never')", **wanted)
            assert "min_isolation" in refusal.value.fields
            assert all(name in str(refusal.value) for name in refusal.value.fields)
            assert refusal.value.fix
            assert backend.started == 0
            assert jar.run("1 + 1").value == 2  # the control arm
            assert backend.started == 1
        finally:
            jar.engine.close()

    def test_the_import_lint_answers_before_anything_starts(self) -> None:
        backend = Counting(self.make_backend())
        if not backend.probe().available:
            pytest.skip(f"{backend.name} is not available")
        jar = self.make_jar(backend)
        try:
            result = jar.run("import socket\nprint('never')", modules=["math"])
            assert (result.status, result.exit_code, result.stdout) == (Status.REFUSED, None, "")
            assert result.error is not None
            assert "socket" in result.error.message
            assert backend.started == 0
            assert jar.run("import math\nmath.floor(2.5)", modules=["math"]).value == 2
        finally:
            jar.engine.close()

    def test_the_network_is_closed_unless_it_is_asked_for(self, jar: Jar) -> None:
        jar.needs(network="off")
        code = """
            import socket
            with socket.create_connection(("127.0.0.1", port), timeout=3) as peer:
                print(peer.recv(100).decode())
            """
        with Listener() as listener:
            closed = jar.run(code, context={"port": listener.port})
            assert closed.status is Status.ERROR, closed
            assert listener.visits == 0
            try:
                opened = jar.run(code, context={"port": listener.port}, network="any")
            except PolicyUnenforceable as refusal:
                pytest.skip(f"no control arm: {refusal}")
            if opened.stdout != "welcome\n":
                pytest.skip(
                    f"no control arm: the host's loopback is not the guest's ({opened.error})"
                )
            assert listener.visits == 1


class Counting:
    """A backend that counts how often it was really asked to start something."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name, self.isolation = backend.name, backend.isolation
        self.probe, self.compile, self.close = backend.probe, backend.compile, backend.close
        self.started = 0

    def run(self, *given: Any) -> Any:
        self.started += 1
        return self._backend.run(*given)


class Listener:
    """A loopback server that greets whoever connects, and counts them."""

    def __enter__(self) -> Listener:
        self.visits = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()
        return self

    def _greet(self) -> None:
        while True:
            peer, address = self._socket.accept()
            with peer:
                if address == self._stop_address:
                    return
                self.visits += 1
                peer.sendall(b"welcome")

    _stop_address: Any = None

    def __exit__(self, *exc: object) -> None:
        with socket.socket() as last:
            last.bind(("127.0.0.1", 0))
            self._stop_address = last.getsockname()
            last.connect(("127.0.0.1", self.port))
            self._thread.join(10)
        self._socket.close()
