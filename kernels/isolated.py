"""Run a candidate in a child process: what crashes or hangs there is a verdict here.

One child serves one candidate case after case, and is started anew after a death. Cases and
results cross a pipe with their arrays bit for bit. The child never holds the only copy of
anything: it can be killed at any time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from typing import IO, Any

from ..oracle.case import Case, Presentation
from ..oracle.result import Result
from .adapters import LoadError
from .candidate import Candidate, Known, Unsupported

#: seconds that a child may take to start and to load its candidate
LOADING = 300.0

#: seconds beyond the limit after which a child that nobody kills ends itself
GRACE = 10.0


class Died(RuntimeError):
    """The candidate's process ended or gave no answer; the message continues "it ..."."""


def isolated(
    target: str, *, timeout: float = 60.0, environment: Mapping[str, str] | None = None, **options: Any
) -> Candidate:
    """The Candidate that ``load(target, **options)`` names, loaded and run in a child process.

    ``timeout`` is the limit in seconds for each case; ``environment`` is set in the child over this
    process's own. Its run raises Died where the child ends ("died of SIGSEGV") or the limit passes
    ("gave no answer within 60 s"); the next case gets a new child. Raises LoadError as ``load``
    does, and where the child does not survive loading.
    """
    if not timeout > 0:
        raise LoadError(f"timeout is {timeout:g}; it must be a positive number of seconds")
    child = _Child(target, options, timeout, dict(environment or {}))
    child.start()
    facts, known = child.facts, child.known
    return Candidate(
        run=child.run,
        known=tuple(
            Known(**{**record, "when": partial(child.is_known, number)}) for number, record in enumerate(known)
        ),
        **facts,
    )


class _Child:
    """A process that holds a candidate, and the two pipes to it."""

    def __init__(self, target: str, options: dict[str, Any], timeout: float, environment: dict[str, str]) -> None:
        self.target, self.options, self.timeout = target, options, timeout
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.facts: dict[str, Any] = {}
        self.known: list[dict[str, Any]] = []

    def start(self) -> None:
        """Start the process and load the candidate in it. Raises LoadError."""
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        # The child imports what this process would, and finds this package where this process did.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({there_read}, {there_write})"
        )
        self.words = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=self.words,
            stderr=self.words,
            pass_fds=(there_read, there_write),
            env={**os.environ, **self.environment},
        )
        os.close(there_read)
        os.close(there_write)
        self.receiver, self.sender = Connection(here_read, writable=False), Connection(here_write, readable=False)
        self.finalizer = weakref.finalize(self, _end, self.process, self.receiver, self.sender, self.words)
        try:
            kind, *answer = self.ask(("load", self.target, self.options, self.timeout), LOADING)
        except Died as death:
            raise LoadError(f"{self.target} could not be loaded in a child process: it {death}") from None
        if kind == "refused":
            self.stop()
            raise LoadError(answer[0])
        self.facts, self.known = answer

    def stop(self) -> None:
        """End the process; the next case starts another."""
        self.finalizer()
        self.process = None

    def run(self, case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        kind, *answer = self.asked("run", _parts(case), presentation, want)
        if kind == "result":
            result: Result = answer[0]
            return result
        if kind == "declined":
            raise Unsupported(answer[0])
        name, text = answer
        # an exception of the kernel keeps its name, wherever its class may live
        raise type(name, (Exception,), {})(text)

    def is_known(self, number: int, case: Case, presentation: Presentation) -> bool:
        """Whether a declared fault concerns a case; only the child has the function that says so."""
        try:
            kind, *answer = self.asked("known", number, _parts(case), presentation)
        except Died:
            return False
        return kind == "known" and bool(answer[0])

    def asked(self, *request: Any) -> tuple[Any, ...]:
        if self.process is None:
            try:
                self.start()
            except LoadError as error:  # it loaded before: this is about the candidate's state, not the user's words
                raise Died(f"could not be started again: {error}") from None
        return self.ask(request, self.timeout)

    def ask(self, request: tuple[Any, ...], limit: float) -> tuple[Any, ...]:
        """Send a request and wait for the answer. Raises Died."""
        assert self.process is not None
        try:
            self.sender.send_bytes(pickle.dumps(request))
            answered = self.receiver.poll(limit)
            data = self.receiver.recv_bytes() if answered else b""
        except (EOFError, OSError):
            raise Died(self.epitaph()) from None
        if not answered:
            self.stop()
            raise Died(f"gave no answer within {limit:g} s")
        try:
            answer: tuple[Any, ...] = pickle.loads(data)
        except Exception as error:  # a kernel may have written over the child's memory
            self.stop()
            raise Died(f"answered with bytes that cannot be read ({type(error).__name__})") from None
        return answer

    def epitaph(self) -> str:
        """How the process ended, with the last line that it wrote where it ended by itself."""
        process = self.process
        assert process is not None
        try:
            code = process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:  # it closed its pipes and lives on
            self.stop()
            return "closed its connection"
        self.words.seek(0)
        lines = self.words.read().decode(errors="replace").strip().splitlines()
        self.stop()
        if code < 0:
            return f"died of {_signal_name(-code)}"
        return f"ended its process with exit code {code}" + (f" ({lines[-1][:200]})" if lines else "")


def _end(process: subprocess.Popen[bytes], receiver: Connection, sender: Connection, words: IO[bytes]) -> None:
    for pipe in (receiver, sender, words):
        pipe.close()
    if process.poll() is None:
        process.kill()
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _parts(case: Case) -> dict[str, Any]:
    """A case's fields: the child builds its own Case of them, with arrays that cannot be written to."""
    return {field.name: getattr(case, field.name) for field in fields(case)}


# -- the child ------------------------------------------------------------------------------


def serve(read: int, write: int) -> None:
    """The child's loop: load a candidate, then answer requests until the parent closes the pipe."""
    import faulthandler

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a verdict; nobody wants its core
    receiver, sender = Connection(read, writable=False), Connection(write, readable=False)
    candidate: Candidate | None = None
    limit = LOADING
    while True:
        try:
            kind, *request = pickle.loads(receiver.recv_bytes())
        except EOFError:
            return
        # should the parent be gone, a kernel that hangs does not stay behind
        faulthandler.dump_traceback_later(limit + GRACE, exit=True)
        if kind == "load":
            answer, candidate, limit = _load(*request)
        else:
            assert candidate is not None
            answer = _ANSWERS[kind](candidate, *request)
        try:
            data = pickle.dumps(answer)
        except Exception as error:  # whatever a kernel put into its result
            data = pickle.dumps(("raised", type(error).__name__, f"its result cannot leave the process: {error}"))
        faulthandler.cancel_dump_traceback_later()
        sender.send_bytes(data)


def _load(target: str, options: dict[str, Any], timeout: float) -> tuple[tuple[Any, ...], Candidate | None, float]:
    from .loading import load

    try:
        candidate = load(target, **options)
    except LoadError as error:
        return ("refused", str(error)), None, timeout
    facts = {f.name: getattr(candidate, f.name) for f in fields(candidate) if f.name not in ("run", "known")}
    known = [{f.name: getattr(k, f.name) for f in fields(k) if f.name != "when"} for k in candidate.known]
    return ("loaded", facts, known), candidate, timeout


def _run(
    candidate: Candidate, parts: dict[str, Any], presentation: Presentation, want: frozenset[str]
) -> tuple[Any, ...]:
    case = Case(**parts)
    try:
        result = candidate.run(case, presentation, want)
    except (Unsupported, NotImplementedError) as refusal:
        return "declined", str(refusal) or type(refusal).__name__
    except Exception as error:
        return "raised", type(error).__name__, str(error)
    if not isinstance(result, Result):
        return "raised", "TypeError", f"the kernel returned a {type(result).__name__}; it must return a Result"
    return "result", result


def _known(candidate: Candidate, number: int, parts: dict[str, Any], presentation: Presentation) -> tuple[Any, ...]:
    return "known", candidate.known[number].when(Case(**parts), presentation)


_ANSWERS: dict[str, Callable[..., tuple[Any, ...]]] = {"run": _run, "known": _known}
