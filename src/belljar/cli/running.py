"""One run from the command line: engine, signals, live output, summary, exit code."""

from __future__ import annotations

import argparse
import errno
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from .. import config, exit_codes, presentation
from ..backends.base import Cancel, Plan
from ..config import Settings
from ..engine import Engine
from ..errors import BelljarError
from ..files import copying
from ..policy import Policy
from ..records import replace
from ..types import Request, Result, Status
from ..units import human_size
from . import outputs, request, stream, summary, terminal
from .arguments import UsageError
from .failures import print_json

_SIGNALS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if (number := getattr(signal, name, None)) is not None
)
_STALLED_SECONDS = 5.0  # how long a reader may take for the rest, once we were asked to end


def open_engine(args: argparse.Namespace, **overrides: Any) -> Engine:
    """The engine for the settings of this command line; the caller closes it."""
    return Engine(config.load(path=args.config, overrides=overrides))


def execute(args: argparse.Namespace, build: Callable[[Settings], Request]) -> int:
    """Run what `build` makes of the settings under the flags in `args`, or only explain it."""
    asked: dict[str, Any] = {
        "level": args.level,
        "wishes": request.wishes(args),
        "backend": args.backend,
    }
    with closing(open_engine(args)) as engine:
        wanted = build(engine.settings)
        if args.explain:
            return _explain(engine.plan(wanted, **asked), as_json=args.json)
        talkative = not args.quiet and not args.json and terminal.is_terminal(sys.stderr)
        if talkative:
            summary.frame(engine.plan(wanted, **asked))

        with Cancel() as cancel:
            output = stream.GuestOutput(
                raw=args.raw, on_broken=cancel.set, most=stream.MOST_PASSED_ON
            )
            if not args.json and not (
                terminal.is_terminal(sys.stdout) and terminal.is_terminal(sys.stderr)
            ):  # one byte more than is passed on, so that it is known that there was more
                wanted = replace(wanted, stream_cap=stream.MOST_PASSED_ON + 1)
            received: list[int] = []
            try:
                with _signals_cancel(cancel) as received:
                    result = engine.run(
                        wanted, emit=None if args.json else output, cancel=cancel, **asked
                    )
            finally:
                # Also after a failure of ours: what the guest said until then is worth having.
                output.finish(patience=_STALLED_SECONDS if received else None)
        if output.failure is not None:
            return _output_failed(output.failure)

        if args.json:
            print_json(presentation.as_json(result))
        else:
            if output.mid_line and not args.quiet:
                terminal.say("")
            _conclude(
                result,
                engine,
                wanted,
                asked,
                args,
                cancelled=bool(received),
                overflowed=output.overflowed,
            )
        status = exit_codes.of_result(result) if output.overflowed is None else 137
        if received:
            status = 128 + received[0]
        return _deliver_files(result, args, talkative=talkative) or status


def _conclude(
    result: Result,
    engine: Engine,
    wanted: Request,
    asked: dict[str, Any],
    args: argparse.Namespace,
    *,
    cancelled: bool,
    overflowed: str | None,
) -> None:
    talkative = terminal.is_terminal(sys.stderr)
    fallback = result.fallback
    if fallback is not None:  # also with --quiet: it is another sandbox than the one asked for
        terminal.complain(f"warning: {fallback.sentence}", fallback.fix, colour="yellow")
    if not args.quiet:
        for warning in result.warnings:
            if fallback is None or warning != fallback.sentence:
                terminal.complain(f"warning: {warning}", colour="yellow")
    if overflowed is not None:
        terminal.complain(
            f"output: the program wrote more than {human_size(stream.MOST_PASSED_ON)} to"
            f" {overflowed}, which is the most that is passed on; it was ended",
            "let it write to a file in a directory shown with --mount DIR:out:rw",
        )
    elif result.status not in (Status.SUCCESS, Status.ERROR) or result.signal is not None:
        summary.trouble(
            result,
            _policy(engine, wanted, asked),
            engine.settings.ceiling,
            cancelled=cancelled,
        )
    if talkative and not args.quiet:
        summary.completion(result, whole=wanted.stream_cap > 0)


def _policy(engine: Engine, wanted: Request, asked: dict[str, Any]) -> Policy | None:
    """The limits the run had, for the message only: without them the message is shorter."""
    try:
        return engine.plan(wanted, **asked).policy
    except BelljarError:
        return None


def _explain(plan: Plan, *, as_json: bool) -> int:
    if not as_json:
        terminal.show(summary.explain(plan))
        return 0
    print_json(
        {
            "backend": plan.backend,
            "isolation": plan.isolation.value,
            "policy": plan.policy.to_dict(),
            "enforcement": {
                name: {"state": held.state, "by": held.by}
                for name, held in plan.enforcement.items()
            },
            "warnings": list(plan.warnings),
        }
    )
    return 0


@contextmanager
def _signals_cancel(cancel: Cancel) -> Iterator[list[int]]:
    """Ctrl-C and the polite kills end the guest first; yields the signals that came."""
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        # A second signal may come anywhere in here. It must not enter set() while the first is
        # inside, where a lock is held; and one of them must get there.
        first = not received
        received.append(number)
        if first:
            cancel.set()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    # Without a poll loop there is nothing to wake, as on Windows.
    waker = cancel.waker() if hasattr(select, "poll") else -1
    woken = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)


def _output_failed(failure: OSError) -> int:
    """Nobody reads any more, which is how `| head` ends us; or our output cannot be written."""
    if failure.errno in (errno.EPIPE, errno.EIO):
        raise BrokenPipeError
    raise UsageError(f"cannot write the program's output: {failure.strerror}") from None


def _deliver_files(result: Result, args: argparse.Namespace, *, talkative: bool) -> int:
    """Write what --out collected. The JSON holds it already, so then only to a given --out-dir.

    With --outputs-to it is written already; what could not be is in the warnings.
    """
    if args.outputs_to is not None:
        asked = copying.Wanted(globs=tuple(args.out) or ("*",))
        for name, file in result.files.items():
            if file.saved is not None and talkative:
                terminal.say(f"   wrote {terminal.visible(name)}")
        missing = any(file.saved is None and asked.has(n) for n, file in result.files.items())
        return 125 if missing else 0
    if not args.out or (args.json and args.out_dir is None):
        return 0
    try:
        done = outputs.write(result.files, args.out_dir or ".", globs=args.out, force=args.force)
    except OSError as error:
        raise UsageError(f"--out-dir {args.out_dir!r}: {error.strerror}") from None
    if talkative:
        for name in done.names:
            terminal.say(f"   wrote {terminal.visible(name)}")
    for name, problem in done.problems.items():
        terminal.complain(f"{name!r} was not written: {problem}")
    return 125 if done.problems else 0
