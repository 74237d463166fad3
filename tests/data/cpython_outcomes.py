"""Runs one of CPython's own test modules and writes down how every single test ended.

Arguments: the module's name, the file to write, and the tests to run if not all of them are. Each
line of the file is a JSON list [outcome, test, words], written as it happens: a run that is killed
says where. It runs the same inside a sandbox and outside.
"""

import json
import os
import socket  # noqa: F401 - a jail brings a loopback up for programs that name this module
import sys
import unittest

# Some builds leave these out; CPython's own file is no more than this.
MULTIPROCESSING = """\
import unittest, test._test_multiprocessing
test._test_multiprocessing.install_tests_in_module_dict(globals(), {method!r})
"""
# Waits for ever on a machine whose vsock device nobody answers.
ENDLESS = {"test_socket": ["ThreadedVSOCKSocketStreamTest"]}
WORDS = 4000


class Outcomes(unittest.TestResult):
    """A line for every test. The parts of a test (`subTest`) count as the test."""

    def __init__(self, module, file):
        super().__init__()
        self._prefixes = (f"test.{module}.", f"{module}.")
        self._file = file
        self._said = False

    def _write(self, outcome, test, words=""):
        name = test if isinstance(test, str) else test.id()
        for prefix in self._prefixes:
            name = name.removeprefix(prefix)
        self._file.write(json.dumps([outcome, name, words[-WORDS:]]) + "\n")
        self._file.flush()
        self._said = True

    def startTest(self, test):
        super().startTest(test)
        self._write("unfinished", test)
        self._said = False

    def stopTest(self, test):
        super().stopTest(test)
        if not self._said:
            self._write("passed", test)

    def _failed(self, test, err):
        self._write("failed", test, self._exc_info_to_string(err, test))

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
        self._write("failed", test, "unexpected success")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        if not isinstance(test, unittest.case._SubTest):  # a skipped part is not a skipped test
            self._write("skipped", test, reason)


def load(module, tests):
    """The suite, out of the `test` package, or made here if this build has left it out."""
    kind, _, method = module.removeprefix("test_").partition("_")
    package = os.path.join(os.path.dirname(__import__("test").__file__), module)
    if kind == "multiprocessing" and not (
        os.path.exists(package) or os.path.exists(package + ".py")
    ):
        with open(f"{module}.py", "w") as file:
            file.write(MULTIPROCESSING.format(method=method))
        sys.path.insert(0, os.getcwd())
        name = module
    else:
        name = f"test.{module}"
    names = [f"{name}.{test}" for test in tests] or [name]
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    for endless in ENDLESS.get(module, ()):
        unittest.skip("it may never end")(getattr(sys.modules[name], endless))
    return suite


def main(module, path, *tests):
    with open(path, "w") as file:
        outcomes = Outcomes(module, file)
        from test import support

        support.use_resources = []  # nothing that needs the Internet, a screen or gigabytes
        support.verbose = 0
        try:
            suite = load(module, tests)
        except unittest.SkipTest as skip:
            outcomes.addSkip("(the module)", str(skip))
        else:
            suite.run(outcomes)
    return 0 if outcomes.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
