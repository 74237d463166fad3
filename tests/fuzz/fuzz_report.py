"""Coverage-guided fuzzing of everything that reads what a guest wrote.

Run `python tests/fuzz/fuzz_report.py -runs=20000`; a crash is a byte sequence that `Report` or a
result made of it does not survive. Extra arguments are libFuzzer's.
"""

from __future__ import annotations

import json
import sys

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["belljar"]):
    from belljar.guest import protocol, values
    from belljar.report import Report
    from belljar.types import Result, Status

KINDS = sorted(protocol.FROM_GUEST)


def test_one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    report = Report(max_bytes=1 << 20, max_frame=1 << 16)
    while provider.remaining_bytes():
        if provider.ConsumeBool():
            piece = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 64))
        else:
            kind = KINDS[provider.ConsumeIntInRange(0, len(KINDS) - 1)]
            payload = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 400))
            piece = protocol.encode(kind, payload)
        report.feed(piece)
    result = Result(
        status=Status.SUCCESS,
        value=report.value,
        error=report.error,
        displays=report.displays,
        warnings=report.warnings,
    )
    wire = result.to_dict()
    json.dumps(wire, allow_nan=False, ensure_ascii=False).encode("utf-8")
    values.decode(wire["value"])


def main() -> None:
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
