"""Runs one of CPython's own test modules and writes down how every single test ended.

Arguments: the module's name, the file to write, and the tests to run if not all of them are. Each
line of the file is a JSON list [outcome, test, words], written as it happens: a run that is killed
says where. It runs the same inside a sandbox and outside.
"""

import importlib.util
import json
import os
import signal
import socket  # noqa: F401 - a jail brings a loopback up for programs that name this module
import sys
import unittest

# Some builds leave these out; CPython's own file is no more than this.
MULTIPROCESSING = """\
import unittest, test._test_multiprocessing
test._test_multiprocessing.install_tests_in_module_dict(globals(), {method!r})
"""
LEFT_OUT = {
    "test_socket.ThreadedVSOCKSocketStreamTest": "waits for ever if no vsock device answers",
    "test_socket.GeneralModuleTests.test_sethostname": "renames the machine",
    "test_time.TimeTestCase.test_monotonic_settime": "sets the machine's clock",
}
WORDS = 4000


class Outcomes(unittest.TestResult):
    """A line for every test. The parts of a test (`subTest`) count as the test."""

    def __init__(self, module, file):
        super().__init__()
        self._prefixes = (f"test.{module}.", f"{module}.")
        self._file = file
        self._said = False

    def say(self, outcome, test, words=""):
        name = test if isinstance(test, str) else test.id()
        for prefix in self._prefixes:
            name = name.removeprefix(prefix)
        self._file.write(json.dumps([outcome, name, words[-WORDS:]]) + "\n")
        self._file.flush()
        self._said = True

    def startTest(self, test):
        super().startTest(test)
        self.say("unfinished", test)
        self._said = False

    def stopTest(self, test):
        super().stopTest(test)
        if not self._said:
            self.say("passed", test)

    def _failed(self, test, err):
        self.say("failed", test, self._exc_info_to_string(err, test))

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(test, err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._failed(test, err)

    def addError(self, test, err):
        super().addError(test, err)
        self._failed(test, err)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.say("failed", test, "unexpected success")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        if not isinstance(test, unittest.case._SubTest):  # a skipped part is not a skipped test
            self.say("skipped", test, reason)


def find(module):
    """The module of the `test` package, or one made here if this build has left it out."""
    kind, _, method = module.removeprefix("test_").partition("_")
    if kind == "multiprocessing" and importlib.util.find_spec(f"test.{module}") is None:
        with open(f"{module}.py", "w") as file:
            file.write(MULTIPROCESSING.format(method=method))
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(module)
    return importlib.import_module(f"test.{module}")


def leave_out(module):
    for name, why in LEFT_OUT.items():
        first, _, rest = name.partition(".")
        if module.__name__ == f"test.{first}":
            owner, _, last = rest.rpartition(".")
            owner = getattr(module, owner) if owner else module
            setattr(owner, last, unittest.skip(why)(getattr(owner, last)))


def run(module, tests, outcomes):
    """As CPython's own runner does it."""
    from test import support

    support.use_resources = []  # nothing that needs the Internet, a screen or gigabytes
    support.verbose = 0
    found = find(module)
    leave_out(found)
    if hasattr(found, "test_main") and hasattr(support, "_run_suite") and not tests:
        support._run_suite = lambda suite: suite.run(outcomes)
        found.test_main()
        return
    names = [f"{found.__name__}.{test}" for test in tests] or [found.__name__]
    unittest.defaultTestLoader.loadTestsFromNames(names).run(outcomes)


def main(module, path, *tests):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(path, "w") as file:
        outcomes = Outcomes(module, file)
        try:
            run(module, tests, outcomes)
        except unittest.SkipTest as skip:
            outcomes.say("skipped", "(the module)", str(skip))
    return 0 if outcomes.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
