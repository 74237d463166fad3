"""Runs one of CPython's own test modules and writes down how every single test ended.

Given the name of a module in the `test` package and the file to write. Each line of the file is a
JSON list [outcome, test, words]: written as it happens, so that a run that was killed says where.
"""

import json
import sys
import unittest

LAST_LINE_OF = {"failed", "error"}


class Outcomes(unittest.TestResult):
    """A line for every test. The parts of a test (`subTest`) count as the test."""

    def __init__(self, module, file):
        super().__init__()
        self._prefix = f"test.{module}."
        self._file = file
        self._bad = None

    def _write(self, outcome, test, words=""):
        name = test if isinstance(test, str) else test.id().removeprefix(self._prefix)
        json.dump([outcome, name, words], self._file)
        self._file.write("\n")
        self._file.flush()

    def startTest(self, test):
        super().startTest(test)
        self._bad = None
        self._write("started", test)

    def stopTest(self, test):
        super().stopTest(test)
        if self._bad is None:
            self._write("passed", test)

    def _went(self, outcome, test, words):
        self._bad = outcome
        self._write(outcome, test, words)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._went("failed", test, self._exc_info_to_string(err, test)[-3000:])

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._went("failed", test, self._exc_info_to_string(err, test)[-3000:])

    def addError(self, test, err):
        super().addError(test, err)
        self._went("failed", test, self._exc_info_to_string(err, test)[-3000:])

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._went("failed", test, "unexpected success")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        # A skipped part of a test is not a skipped test.
        if not isinstance(test, unittest.case._SubTest):
            self._went("skipped", test, reason)


def main(module, path):
    with open(path, "w") as file:
        outcomes = Outcomes(module, file)
        from test import support

        support.use_resources = []  # nothing that needs the Internet, a screen or gigabytes
        support.verbose = 0
        try:
            suite = unittest.defaultTestLoader.loadTestsFromName(f"test.{module}")
        except unittest.SkipTest as skip:
            outcomes._write("skipped", "", str(skip))
            return 0
        suite.run(outcomes)
        return 0 if outcomes.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
