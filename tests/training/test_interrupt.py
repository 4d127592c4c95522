from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from voxelfield.interrupt import Interrupt, Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def received():
    """Handlers that stand for the program's own, so that a signal that gets through is seen and kills nothing."""
    signals: list[int] = []

    def note(number, frame):
        signals.append(number)

    previous = {number: signal.signal(number, note) for number in SIGNALS}
    yield signals
    for number, handler in previous.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs handlers between two bytecodes of the main thread


@pytest.mark.parametrize("number", SIGNALS)
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
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt() as interrupt:
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    send(signal.SIGINT)
    assert received == [signal.SIGINT]
    assert not interrupt.requested


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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_block_with_nothing_to_finish_ends_at_once_but_what_follows_is_not_disturbed(number):
    reached = []

    def work(interrupt: Interrupt, name: str) -> None:
        with interrupt.at_once():
            reached.append(f"{name} began")
            send(number)
            reached.append(f"{name} ended")

    with Interrupt() as interrupt:
        with pytest.raises(Interrupted):
            work(interrupt, "first")
        send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            work(interrupt, "second")
    assert reached == ["first began"]


def test_an_inner_one_and_its_outer_one_tell_each_other(received):
    with Interrupt() as outer:
        with Interrupt() as inner:
            send(signal.SIGTERM)
            assert inner.requested
        assert outer.requested
        with Interrupt() as later:
            assert later.requested
    assert received == []


def test_a_hangup_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        send(signal.SIGHUP)
        assert not interrupt.requested


@pytest.mark.parametrize("arrives", [True, False])
def test_after_the_last_one_a_signal_does_not_change_how_the_program_ends(arrives, received):
    with Interrupt(last=True):
        if arrives:
            send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert received == ([] if arrives else [signal.SIGTERM])
