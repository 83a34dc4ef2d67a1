"""One lane at a time computes, in the order in which answers come, each with its own random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest
import torch
from torch import nn

from swarm.client.threads.compute_lock import (
    ComputeLock,
    ComputeTicket,
    RandomState,
    current_ticket,
    share_head,
    shared_with_no_lane,
)
from swarm.models.exits.direct_reading import DirectReading

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _random_numbers_as_before() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


class Threads:
    """Runs functions in threads; what one of them raises is raised at the end."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        if self._errors:
            raise self._errors[0]


@pytest.fixture
def threads() -> Threads:
    return Threads()


def test_lanes_compute_one_at_a_time_in_the_order_of_their_replies(threads: Threads) -> None:
    lock = ComputeLock()
    answers: list[Future[str]] = [Future() for _ in range(4)]
    waiting = [threading.Event() for _ in answers]
    order: list[str] = []
    computing = 0

    def lane(number: int) -> None:
        nonlocal computing
        with ComputeTicket(lock) as ticket:
            assert current_ticket() is ticket
            waiting[number].set()
            order.append(ticket.wait(answers[number]))
            computing += 1
            assert computing == 1
            torch.randn(64, 64) @ torch.randn(64, 64)
            computing -= 1
        assert current_ticket() is None

    for number in range(4):
        threads.start(lambda number=number: lane(number))
    for event in waiting:
        assert event.wait(60)
    holder = ComputeTicket(lock)
    with holder:  # while somebody computes, those whose answers come stand in line
        for number in (2, 0, 3, 1):
            answers[number].set_result(str(number))
    threads.join()
    assert order == ["2", "0", "3", "1"]


def test_other_lanes_compute_while_one_waits(threads: Threads) -> None:
    lock = ComputeLock()
    first, second = Future[int](), Future[int]()

    def waiter() -> None:
        with ComputeTicket(lock) as ticket:
            assert ticket.wait(first) == 1

    def other() -> None:
        with ComputeTicket(lock) as ticket:
            first.set_result(1)  # the first one continues when this one waits, not before
            assert ticket.wait(second) == 2

    threads.start(waiter)
    threads.start(other)
    second.set_result(2)
    threads.join()


def test_a_cancelled_ticket_does_not_wait(threads: Threads) -> None:
    never: Future[None] = Future()
    waiting = threading.Event()
    ticket = ComputeTicket(ComputeLock())

    class Watched(Future[None]):
        def add_done_callback(self, callback: Callable[[Future[None]], object]) -> None:
            super().add_done_callback(callback)
            waiting.set()

    never = Watched()

    def lane() -> None:
        with ticket:
            with pytest.raises(CancelledError):
                ticket.wait(never)
            with pytest.raises(CancelledError):  # nor the next time
                ticket.wait(Future())

    threads.start(lane)
    assert waiting.wait(60)
    ticket.cancel()
    threads.join()
    assert never.cancelled()


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_what_a_lane_samples_depends_on_its_seed_alone(threads: Threads, order: tuple[int, ...]) -> None:
    lock = ComputeLock()
    rounds = 3
    answers = [[Future[None]() for _ in range(rounds)] for _ in order]
    numbers: dict[int, list[float]] = {number: [] for number in order}
    drawn = [[threading.Event() for _ in range(rounds)] for _ in order]

    def lane(number: int) -> None:
        with ComputeTicket(lock, RandomState(CPU, seed=number)) as ticket:
            for answer, event in zip(answers[number], drawn[number], strict=True):
                ticket.wait(answer)
                numbers[number].append(float(torch.rand(())))
                event.set()

    for number in order:
        threads.start(lambda number=number: lane(number))
    for step in range(rounds):
        for number in order:
            answers[number][step].set_result(None)
            assert drawn[number][step].wait(60)
    threads.join()
    for number, values in numbers.items():
        torch.manual_seed(number)
        assert values == [float(torch.rand(())) for _ in range(rounds)]


class Counted:
    """Doubles numbers, and remembers which came together."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, values: list[int]) -> list[int]:
        self.calls.append(sorted(values))
        if 13 in values:
            raise ZeroDivisionError
        return [2 * value for value in values]


def together(threads: Threads, values: list[int], leaving: tuple[int, ...] = ()) -> tuple[Counted, dict[int, object]]:
    """Lanes whose answers come while another one computes; those of `leaving` compute nothing together."""
    lock, work = ComputeLock(), Counted()
    answers: dict[int, Future[None]] = {value: Future() for value in values}
    waiting = [threading.Event() for _ in values]
    found: dict[int, object] = {}

    def lane(value: int, event: threading.Event) -> None:
        with ComputeTicket(lock) as ticket:
            event.set()
            ticket.wait(answers[value])
            if value in leaving:
                return
            try:
                found[value] = ticket.compute_batched(value, work)
            except ZeroDivisionError as error:
                found[value] = error

    for value, event in zip(values, waiting, strict=True):
        threads.start(lambda value=value, event=event: lane(value, event))
    for event in waiting:
        assert event.wait(60)
    with ComputeTicket(lock):
        for answer in answers.values():
            answer.set_result(None)
    threads.join()
    return work, found


def test_a_lone_lane_computes_alone(threads: Threads) -> None:
    work, found = together(threads, [5])
    assert (work.calls, found) == ([[5]], {5: 10})
    with ComputeTicket(ComputeLock()) as ticket:
        assert ticket.compute_batched(6, work) == 12


@pytest.mark.parametrize("leaving", [(), (4,), (1, 2, 3)])
def test_a_lane_that_ends_does_not_delay_the_batch(threads: Threads, leaving: tuple[int, ...]) -> None:
    work, found = together(threads, [1, 2, 3, 4], leaving)
    stay = [value for value in (1, 2, 3, 4) if value not in leaving]
    assert work.calls == [stay]
    assert found == {value: 2 * value for value in stay}


def test_an_error_in_a_batch_is_raised_in_all_its_lanes(threads: Threads) -> None:
    work, found = together(threads, [1, 13, 2])
    assert work.calls == [[1, 2, 13]]
    assert all(isinstance(error, ZeroDivisionError) for error in found.values())
    assert len(found) == 3


def test_each_lane_gets_its_own_scores():
    torch.manual_seed(0)
    head = nn.Linear(8, 32, bias=False)
    rows = torch.randn(5, 1, 1, 8)
    expected = [head(row) for row in rows]
    calls: list[int] = []
    plain = head.forward
    head.forward = lambda hidden: (calls.append(hidden.shape[0]), plain(hidden))[1]
    share_head(head)

    lock, found = ComputeLock(), {}
    answers: list[Future[None]] = [Future() for _ in rows]
    waiting = [threading.Event() for _ in rows]

    def lane(number: int) -> None:
        with torch.no_grad(), ComputeTicket(lock) as ticket:
            waiting[number].set()
            ticket.wait(answers[number])
            found[number] = head(rows[number])

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(len(rows))]
    for thread, event in zip(threads, waiting, strict=True):
        thread.start()
        assert event.wait(60)
    with ComputeTicket(lock):  # while somebody computes, their answers come
        for answer in answers:
            answer.set_result(None)
    for thread in threads:
        thread.join(60)
    for number, scores in found.items():
        torch.testing.assert_close(scores, expected[number])
    assert len(found) == 5
    assert calls == [5]


def test_a_recorded_forward_shares_the_head():
    head = nn.Linear(8, 32, bias=False).requires_grad_(False)
    share_head(head)
    shared: list[torch.Tensor] = []

    class Ticket(ComputeTicket):
        def compute_batched(self, value, work):
            shared.append(value)
            return super().compute_batched(value, work)

    hidden = torch.randn(1, 1, 8)
    with torch.no_grad(), Ticket(ComputeLock()):
        reading = DirectReading(lambda hidden: head(hidden) * 2, shared_with_no_lane)
        found = [reading(hidden) for _ in range(2)]
        assert current_ticket() is not None
    assert [one.data_ptr() for one in shared] == [hidden.data_ptr()] * 2, "what was recorded and compared is not"
    assert all(one.equal(head(hidden) * 2) for one in found)


def test_only_single_tokens_without_gradients_in_lanes_share_the_head():
    head = nn.Linear(4, 6)
    rows = torch.randn(2, 3, 4)
    expected = head(rows)
    share_head(head)
    torch.testing.assert_close(head(rows), expected)
    with ComputeTicket(ComputeLock()):
        torch.testing.assert_close(head(rows), expected)
        one = head(rows[:1, :1])
        assert one.requires_grad
        torch.testing.assert_close(one, expected[:1, :1])
