"""The suite that every backend passes: import it, say how to make your backend, and run pytest.

    # tests/test_mine.py
    from belljar.testing.conformance import BackendConformance
    from mine import MyBackend

    class TestMyBackend(BackendConformance):
        def make_backend(self):
            return MyBackend()

A backend declares nothing special. What it claims is read from the enforcement report of its plan,
and the suite holds it to that: a field that is `enforced` or `best_effort` has to hold, a field
that is `absent` has to be refused when a request asks for it. A backend on the rung `none` shares
the host's process, so what needs a process of its own is skipped for it. If the backend has an
attribute `layers` (names of its mechanisms on this host) and its class takes
`disable=frozenset({layer})`, the suite also checks that a disabled layer changes the report.

Skips say why. A backend that is not available on this host skips the whole class, with its fix.
"""

import pytest

# Plain asserts below should fail with the values in them, as they do in a test file.
_PARTS = (
    "files", "harness", "imports", "kills", "limits", "places", "policies", "programs", "projects",
    "reach", "results", "runs", "values",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from .files import Files  # noqa: E402
from .harness import Jar  # noqa: E402
from .imports import Imports  # noqa: E402
from .kills import Kills  # noqa: E402
from .limits import Limits  # noqa: E402
from .places import Places  # noqa: E402
from .policies import Policies  # noqa: E402
from .programs import Programs  # noqa: E402
from .projects import Projects  # noqa: E402
from .reach import Reach  # noqa: E402
from .results import Results  # noqa: E402
from .runs import Runs  # noqa: E402
from .values import Values  # noqa: E402

__all__ = ["BackendConformance", "Jar"]


class BackendConformance(
    Results,
    Values,
    Programs,
    Files,
    Places,
    Imports,
    Reach,
    Projects,
    Limits,
    Kills,
    Runs,
    Policies,
):
    """Subclass it as `Test...` and define `make_backend`."""
