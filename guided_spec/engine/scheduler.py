"""Which requests hold a slot, which wait for one, and which are admitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice

from guided_spec.engine.request import Request, State
from guided_spec.engine.target.pictures import PicturePlaces
from guided_spec.engine.target.routes import Routes
from guided_spec.errors import GrammarError, GuidedSpecError, ModelError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.models.causal_lm import CausalLM

BOUND_AT_ONCE = 8  # texts that get their grammars while a step runs: more would hold it up
PICTURES_AT_ONCE = 1  # that are read before a step: running texts wait for more
PATIENCE = 0.05  # seconds until somebody may have cancelled


class Scheduler:
    """First come, first served, as soon as a slot is free and the grammar is compiled.

    A step looks at those that may begin, not at all that wait: a hundred times as many may.

    num_slots: requests that can run at once; the others wait.
    """

    def __init__(self, num_slots: int) -> None:
        self._waiting: dict[Request, None] = {}
        self._running: dict[int, Request] = {}  # by slot, ascending
        self._by_prompt: defaultdict[int, dict[int, Request]] = defaultdict(dict)
        self._free = list(range(num_slots))
        self._admitted: Container[Request] | None = None  # others wait; None: nobody has to

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting[request] = None

    def end(self, request: Request, error: GuidedSpecError) -> None:
        """End a request that runs or waits, with an error; it keeps its slot until it is removed.

        Does nothing where it has ended.
        """
        request.fail(error)
        self._waiting.pop(request, None)

    def __iter__(self) -> Iterator[Request]:
        """Every request that has not ended: first the running ones by slot, then the queue."""
        return iter([*self._running.values(), *self._waiting])

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    def running(self, state: State | None = None) -> list[Request]:
        """The requests that hold a slot, by slot; only those in ``state`` unless it is None."""
        requests = list(self._running.values())
        return requests if state is None else [r for r in requests if r.state is state]

    @property
    def all_decode(self) -> bool:
        """Whether no request that holds a slot does anything else than decode."""
        return all(request.state is State.DECODE for request in self._running.values())

    def ready(self) -> list[Request]:
        """Waiting requests whose grammar is done, at most as many as there are free slots.

        A request whose grammar is still being compiled is overtaken by later ones.
        """
        return self.coming(len(self._free))

    def coming(self, most: int) -> list[Request]:
        """``ready`` of up to ``most`` free slots, however many there are now."""
        only = self._admitted
        done = (
            request
            for request in self._waiting
            if (request.job.grammar is None or request.job.grammar.done())
            and (only is None or request in only)
        )
        return list(islice(done, most))

    def restrict(self, requests: Container[Request] | None) -> None:
        """Keep back all requests but these from now on; None: keep back none."""
        self._admitted = requests

    def sharing_prompt(self, request: Request) -> list[Request]:
        """The requests in slots that may have the same prompt (equal hash), by slot; itself too."""
        found = self._by_prompt.get(request.prompt_hash, {})
        return [found[slot] for slot in sorted(found)]

    def admit(self, request: Request) -> None:
        """Give a waiting request the lowest free slot."""
        del self._waiting[request]
        self._free.sort()
        slot = request.text.slot = self._free.pop(0)
        request.state = State.PREFILL
        self._running = dict(sorted([*self._running.items(), (slot, request)]))
        self._by_prompt[request.prompt_hash][slot] = request

    def requeue(self, request: Request) -> None:
        """Take a running request's slot; it is the next one to be admitted."""
        self._take_slot(request)
        request.text.slot, request.state = -1, State.WAITING
        self._waiting = {request: None, **self._waiting}

    def remove_finished(self, in_flight: Container[Request] = ()) -> list[int]:
        """Remove requests that have ended and hold a slot; returns the slots that became free.

        in_flight: requests that keep their slots, since a launched step still writes there.
        """
        running = self._running.values()
        ended = [r for r in running if r.state is State.FINISHED and r not in in_flight]
        for request in ended:
            self._take_slot(request)
        return [request.text.slot for request in ended]

    def _take_slot(self, request: Request) -> None:
        slot, sharing = request.text.slot, self._by_prompt[request.prompt_hash]
        del self._running[slot], sharing[slot]
        if not sharing:
            del self._by_prompt[request.prompt_hash]
        self._free.append(slot)


@dataclass(frozen=True)
class Intake:
    """Admits requests whose grammars are compiled, while the model's KV cache has capacity.

    longest_draft: draft tokens of a text at most. is_parallel: whether several processes run the
    model, which must admit the same requests at the same step. pictures, routes: of the requests.
    """

    scheduler: Scheduler
    model: CausalLM
    longest_draft: int
    pictures: PicturePlaces
    routes: Routes
    is_parallel: bool

    def admit(self) -> None:
        """Give slots to those that may begin."""
        if self.is_parallel:
            # Whose grammar is done first must not decide what is batched in which process.
            wait(self._grammars())
        last = self.pictures.num_read + PICTURES_AT_ONCE
        ready = self.scheduler.ready()
        self.pictures.read_ahead(ready, self._most_pictures(last))
        for request in ready:
            if not self.model.has_blocks(len(request.text.tokens) + self.longest_draft):
                break  # else it would read its prompt, and go back to the queue
            if self._bind(request):
                if not self._place_pictures(request, last):
                    break
                if request.state is State.FINISHED:
                    continue
                self.scheduler.admit(request)
                self.pictures.begin(request)
                if self.model.adapters is not None:
                    self.model.adapters.put(request.text.slot, request.job.params.lora)
                self.routes.begin(request.text.slot, request.routes)
                request.num_cached, request.is_begun = 0, False
                request.stats.start()

    def bind_next(self) -> None:
        """Bind those that come next to their grammars, while the device works."""
        for request in [] if self.is_parallel else self.scheduler.coming(BOUND_AT_ONCE):
            self._bind(request)

    def wait(self) -> None:
        """Wait for a grammar, for a while."""
        wait(self._grammars(), timeout=PATIENCE, return_when="FIRST_COMPLETED")

    def _bind(self, request: Request) -> bool:
        """Give it its compiled grammar; False where that cannot be, with which it ends."""
        try:
            request.take_grammar()
        except GuidedSpecError as error:
            self.scheduler.end(request, error)
        except Exception as error:  # as of a backend's matcher; it concerns this request alone
            self.scheduler.end(request, GrammarError(f"the grammar cannot be used: {error!r}"))
        return request.state is not State.FINISHED

    def _place_pictures(self, request: Request, last: int) -> bool:
        """False where it has to wait for rows; it ends where its pictures cannot be read.

        last: the number of the picture after which texts that run go on before others are read.
        """
        try:
            return self.pictures.place(request, self._most_pictures(last))
        except GuidedSpecError as error:
            self.scheduler.end(request, error)
        except Exception as error:  # of the vision tower; it concerns this request alone
            self.scheduler.end(request, ModelError(f"its pictures cannot be read: {error!r}"))
        return True

    def _most_pictures(self, last: int) -> int | None:
        """How many may be read now, see ``_place_pictures``; None: any number, for nobody waits."""
        return max(0, last - self.pictures.num_read) if self.scheduler.num_running else None

    def _grammars(self) -> list[Future[CompiledGrammar]]:
        jobs = [request.job for request in self.scheduler]
        return [job.grammar for job in jobs if job.grammar is not None]
