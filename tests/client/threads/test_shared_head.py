"""The head computes rows of several lanes at once, and each gets its own scores."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
from torch import nn

from swarm.client.threads.compute_lock import (
    ComputeLock,
    ComputeTicket,
    current_ticket,
    share_head,
    shared_with_no_lane,
)
from swarm.models.exits.direct_reading import DirectReading


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


def test_several_rows_gradients_and_people_without_lanes_are_computed_as_ever():
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
