"""What others need to test with Belljar: a fake backend, and the suite that every backend passes.

`FakeBackend` is for tests of what sits on the engine; `belljar.testing.conformance` (it needs
pytest) is for tests of a backend.
"""

from .fake import FakeBackend

__all__ = ["FakeBackend"]
