"""Who gets a slot, and when."""

from __future__ import annotations

from concurrent.futures import Future

from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request, State
from guided_spec.engine.scheduler import Scheduler
from guided_spec.errors import RequestCancelledError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.types import SamplingParams
from tests.toys import VOCABULARY


def ignore(chunk: Chunk) -> None:
    del chunk


def request(grammar: Future[CompiledGrammar] | None = None) -> Request:
    return Request(Job([1, 2], SamplingParams(), 16, grammar=grammar), VOCABULARY, ignore)


def admit_all(scheduler: Scheduler) -> list[Request]:
    admitted = scheduler.ready()
    for one in admitted:
        scheduler.admit(one)
    return admitted


def test_first_come_first_served_at_the_lowest_slot() -> None:
    scheduler = Scheduler(2)
    assert not scheduler
    requests = [request() for _ in range(4)]
    for one in requests:
        scheduler.add(one)
    assert admit_all(scheduler) == requests[:2]
    assert [one.text.slot for one in requests] == [0, 1, -1, -1]
    assert all(one.state is State.PREFILL for one in requests[:2])
    assert scheduler.ready() == []  # no slot is free
    assert list(scheduler) == requests

    requests[0].finish("stop")
    assert scheduler.remove_finished() == [0]
    assert admit_all(scheduler) == requests[2:3]
    assert scheduler.running() == [requests[2], requests[1]]  # by slot


def test_a_request_whose_grammar_is_not_done_is_overtaken() -> None:
    slow: Future[CompiledGrammar] = Future()
    scheduler = Scheduler(1)
    waiting, quick = request(slow), request()
    scheduler.add(waiting)
    scheduler.add(quick)
    assert scheduler.ready() == [quick]
    slow.set_exception(ValueError("broken"))  # failed is done, too
    assert scheduler.ready() == [waiting]


def test_running_by_state() -> None:
    scheduler = Scheduler(3)
    requests = [request() for _ in range(3)]
    for one in requests:
        scheduler.add(one)
    admit_all(scheduler)
    requests[1].state = State.DECODE
    assert scheduler.running(State.DECODE) == [requests[1]]
    assert scheduler.running(State.PREFILL) == [requests[0], requests[2]]


def test_requests_with_one_prompt() -> None:
    """By slot; those in the queue hold none, and those that have ended hold none any more."""
    scheduler = Scheduler(3)
    requests = [request() for _ in range(4)]
    other = Request(Job([2, 1], SamplingParams(), 16), VOCABULARY, ignore)
    for one in [requests[0], other, *requests[1:]]:
        scheduler.add(one)
    admit_all(scheduler)
    assert scheduler.sharing_prompt(requests[3]) == requests[:2]
    assert scheduler.sharing_prompt(other) == [other]
    scheduler.requeue(requests[0])
    assert scheduler.ready() == [requests[0]]
    assert scheduler.sharing_prompt(requests[1]) == [requests[1]]
    admit_all(scheduler)
    assert scheduler.sharing_prompt(requests[1]) == requests[:2]
    for one in (other, *requests[:2]):
        one.finish("stop")
    scheduler.remove_finished()
    assert scheduler.sharing_prompt(other) == scheduler.sharing_prompt(requests[3]) == []


class Counting(Future[CompiledGrammar]):
    """Counts how often it is looked at."""

    looks = 0

    def done(self) -> bool:
        self.looks += 1
        return True


def test_a_long_queue_is_not_looked_through() -> None:
    scheduler, grammar = Scheduler(2), Counting()
    for _ in range(1000):
        scheduler.add(request(grammar))
    admit_all(scheduler)
    assert scheduler.ready() == []
    scheduler.running()[0].finish("stop")
    scheduler.remove_finished()
    assert len(admit_all(scheduler)) == 1
    assert grammar.looks < 10


def test_a_request_may_end_in_the_queue() -> None:
    scheduler = Scheduler(1)
    first, second, third = (request() for _ in range(3))
    for one in (first, second, third):
        scheduler.add(one)
    admit_all(scheduler)
    error = RequestCancelledError("nobody waits")
    scheduler.end(second, error)
    assert scheduler.remove_finished() == []  # it had no slot to give back
    assert list(scheduler) == [first, third]
    scheduler.end(third, error)
    scheduler.end(first, error)  # which is not in the queue
    assert scheduler.remove_finished() == [0]
    assert not scheduler


def test_slots_are_given_out_in_order_after_any_order_of_return() -> None:
    scheduler = Scheduler(3)
    requests = [request() for _ in range(6)]
    for one in requests:
        scheduler.add(one)
    admit_all(scheduler)
    for index in (2, 0, 1):
        requests[index].finish("stop")
        scheduler.remove_finished()
    admit_all(scheduler)
    assert [one.text.slot for one in requests[3:]] == [0, 1, 2]


def test_those_that_come_next_need_no_free_slot() -> None:
    slow: Future[CompiledGrammar] = Future()
    scheduler = Scheduler(1)
    first, waiting, *others = request(), request(slow), *(request() for _ in range(3))
    for one in (first, waiting, *others):
        scheduler.add(one)
    admit_all(scheduler)
    assert scheduler.ready() == []
    assert scheduler.coming(2) == others[:2]
