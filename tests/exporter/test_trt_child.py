"""A process of its own: crashes, hangs and faults of it are outcomes here."""

from __future__ import annotations

import os
import signal
import time

import pytest

from exporter.errors import BuildFailed
from exporter.trt.child import Child, ChildDiedError

THIS = "tests.exporter.test_trt_child"


def echo(connection):
    while True:
        connection.send(connection.recv())


def abort(connection):
    print("terminate called without an active exception", flush=True)
    os.abort()


def crash(connection):
    connection.recv()
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse(connection):
    raise BuildFailed("node 7 cannot be built")


def fault(connection):
    raise ZeroDivisionError("a fault of ours")


def sleep(connection):
    connection.send(os.getpid())
    time.sleep(600)


def test_messages_go_both_ways():
    with Child(f"{THIS}:echo", "the echo") as child:
        for message in ({"a": 1}, b"x" * (1 << 20)):
            child.send(message)
            assert child.receive(30) == message


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("abort", "the thing ended with signal SIGABRT; its last words: terminate called without an active exception"),
        ("crash", "the thing ended with signal SIGSEGV"),
        ("fault", "the thing ended with exit code 1; its last words: ZeroDivisionError: a fault of ours"),
    ],
)
def test_a_crash_is_told_by_its_signal_and_last_words(function, text):
    with Child(f"{THIS}:{function}", "the thing") as child:
        if function == "crash":
            child.send("go")
        with pytest.raises(ChildDiedError, match=text):
            child.receive(30)


def test_a_fault_for_the_user_arrives_as_itself():
    with Child(f"{THIS}:refuse", "the build") as child, pytest.raises(BuildFailed, match="node 7 cannot be built"):
        child.receive(30)


def test_a_hang_ends_after_its_time_and_leaves_no_process():
    with Child(f"{THIS}:sleep", "the run") as child:
        pid = child.receive(30)
        with pytest.raises(ChildDiedError, match=r"no answer within 0\.2 s"):
            child.receive(0.2)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_exception_of_the_parent_ends_the_child():
    def interrupted():
        with Child(f"{THIS}:sleep", "the build") as child:
            pids.append(child.receive(30))
            raise KeyboardInterrupt

    pids = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_sending_to_the_dead_is_an_error():
    with Child(f"{THIS}:abort", "the thing") as child:
        with pytest.raises(ChildDiedError):
            child.receive(30)
        with pytest.raises(ChildDiedError):
            child.send("is anybody there")
