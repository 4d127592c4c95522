from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from voxelfield.training.interrupt import Interrupt


@pytest.fixture(autouse=True)
def received():
    """Handlers that stand for the program's own, so that a signal that gets through is seen and kills nothing."""
    signals: list[int] = []

    def note(number, frame):
        signals.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    yield signals
    for number, handler in previous.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs handlers between two bytecodes of the main thread


def test_nothing_is_requested_at_first(received):
    with Interrupt() as interrupt:
        assert not interrupt.requested
    assert not interrupt.requested
    assert received == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number, received):
    with Interrupt() as interrupt:
        send(number)
        assert interrupt.requested
    assert received == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once(first):
    interrupt = Interrupt()

    def impatient():
        with interrupt:
            send(first)
            assert interrupt.requested
            send(signal.SIGINT)
            pytest.fail("the second Ctrl-C did not raise")

    with pytest.raises(KeyboardInterrupt):
        impatient()


def test_a_batch_system_may_repeat_its_signal():
    with Interrupt() as interrupt:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert interrupt.requested


def test_handlers_are_restored(received):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt() as interrupt:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    send(signal.SIGINT)
    assert received == [signal.SIGINT]
    assert not interrupt.requested


def test_handlers_are_restored_after_an_error(received):
    with pytest.raises(ZeroDivisionError), Interrupt():
        _ = 1 / 0
    send(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_in_a_thread_signals_stay_with_the_program(received):
    before = signal.getsignal(signal.SIGINT)
    seen = {}

    def work():
        try:
            with Interrupt() as interrupt:
                seen["handler"] = signal.getsignal(signal.SIGINT)
                seen["requested"] = interrupt.requested
        except BaseException as error:
            seen["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == {"handler": before, "requested": False}
    assert signal.getsignal(signal.SIGINT) == before
