"""Threads that run one at a time, in virtual time: what happens is a pure function of a seed.

    wait     hands on to one of those who can go on, chosen by the dice; if nobody can, time passes to the next event
    notify   whoever waits at a place is asked whether it can go on now, and nobody else is
    after    something that will happen at a later time: a message that comes, a wait that ends in vain

Nothing sleeps: an hour of waiting takes as long as looking at the clock. Each thread is a real one, so whatever
uses threads runs as it is, but only the one whose turn it is runs; the others wait for theirs.
*Laws*: the same seed gives the same history; who waits without end while nothing can happen any more is told so.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline import transport

STUCK_S = 60.0  # of real time: whoever computes longer than this without waiting is lost


class Killed(BaseException):
    """Nothing of this rank runs any more. No program catches it."""


def _shut() -> threading.Lock:
    """Whoever acquires it waits until somebody else releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Runner:
    """A real thread, which does one thing after another: making one takes longer than most of what they do."""

    def __init__(self) -> None:
        self.turn = _shut()
        self.work: Callable[[], None] = lambda: None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.turn.acquire()
            self.work()
            _idle.append(self)


_idle: list[_Runner] = []  # of all worlds


class Task:
    """One thread's part. ``owner``: whose it is; a thread that it starts is of the same."""

    def __init__(self, owner: int, work: Callable[[], None], runner: _Runner):
        self.owner, self.work, self.turn = owner, work, runner.turn
        self.ready: Callable[[], Any] = lambda: True
        self.parked = self.over = False
        self.num_waits = 0  # an alarm that was set for an earlier one is not heard
        self.joining: Place = []


Place = list[Task]  # who waits there


class World(transport.Threads):
    """Virtual time, and whose turn it is. To be used as `contract.Threads` by all that runs in it."""

    def __init__(self, seed: int = 0):
        self.dice = random.Random(seed)
        self.clock = 0.0
        self.dead: set[int] = set()
        self.stuck = ""  # who waited for what, if everyone waited without end
        self.error: BaseException | None = None
        self._tasks: list[Task] = []
        self._able: list[Task] = []  # of them, those who can go on
        self._stalled: dict[int, float] = {}  # by owner: until when
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = 0
        self._running: Task | None = None
        self._ended = _shut()
        self.Thread, self.Condition, self.Queue = self._thread, self._condition, self._queue

    # for whoever runs in it

    def now(self) -> float:
        return self.clock

    @property
    def owner(self) -> int:
        assert self._running
        return self._running.owner

    def wait(self, ready: Callable[[], Any], timeout_s: float | None = None, place: Place | None = None) -> bool:
        """Until ``ready()`` is true, which is asked when ``place`` is notified, or for so many virtual seconds.

        Returns which of them it was."""
        me = self._running
        assert me
        end = math.inf if timeout_s is None else self.clock + timeout_s
        place = [] if place is None else place
        self._living(me)
        while not ready():
            if self.clock >= end:
                return False
            me.ready, me.parked, me.num_waits = ready, True, me.num_waits + 1
            if end < math.inf:
                self.after(end - self.clock, partial(self._wake, me, me.num_waits))
            place.append(me)
            self._hand_on(me)
            place.remove(me)
            self._living(me)
        return True

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def yield_(self) -> None:
        """Others may run first."""
        me = self._running
        assert me
        self._able.append(me)
        self._hand_on(me)
        self._living(me)

    def notify(self, place: Place) -> None:
        for task in place:
            if task.parked and task.ready():
                self._wake(task, task.num_waits)

    def after(self, delay_s: float, happens: Callable[[], Any]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.clock + delay_s, self._number, happens))

    def stall(self, owner: int, seconds: float) -> None:
        """Nothing of it runs for so long, beginning where it hands on."""
        self._stalled[owner] = self.clock + seconds
        self.after(seconds, lambda: None)

    def stands_still(self, owner: int) -> bool:
        return self._stalled.get(owner, 0.0) > self.clock

    def die(self, owner: int) -> None:
        """Whatever of it waits ends there."""
        self.dead.add(owner)
        for task in self._tasks:
            if task.owner == owner:
                self._wake(task, task.num_waits)

    def start(self, owner: int, work: Callable[[], None]) -> Task:
        runner = _idle.pop() if _idle else _Runner()
        task = Task(owner, work, runner)
        runner.work = partial(self._run, task)
        self._tasks.append(task)
        self._able.append(task)
        return task

    def run(self) -> None:
        """Lets all that was started run to its end. Raises what any of it raised."""
        if not self._tasks:
            return
        self._running = first = self._next()
        first.turn.release()
        if not self._ended.acquire(timeout=STUCK_S):
            raise TimeoutError(f"a thread of rank {self.owner} has been computing for {STUCK_S:.0f} s")
        if self.error:
            raise self.error

    # whose turn it is

    def _run(self, task: Task) -> None:
        try:
            if task.owner not in self.dead:
                task.work()
        except Killed:
            pass
        except BaseException as error:
            self.error = self.error or error
        finally:
            task.over = True
            self._tasks.remove(task)
            self.notify(task.joining)
            self._running = following = self._next() if self._tasks else None
            (following.turn if following else self._ended).release()

    def _hand_on(self, me: Task) -> None:
        following = self._next()
        if following is not me:
            self._running = following
            following.turn.release()
            me.turn.acquire()

    def _living(self, me: Task) -> None:
        if me.owner in self.dead:
            raise Killed

    def _wake(self, task: Task, wait: int) -> None:
        if task.parked and task.num_waits == wait:
            task.parked = False
            self._able.append(task)

    def _next(self) -> Task:
        while True:
            able = [i for i, task in enumerate(self._able) if task.owner in self.dead or not self._stands(task)]
            if able:
                return self._able.pop(able[self.dice.randrange(len(able))] if len(able) > 1 else able[0])
            self._pass()

    def _stands(self, task: Task) -> bool:
        return bool(self._stalled) and self.stands_still(task.owner)

    def _pass(self) -> None:
        """Time goes to the next thing that happens."""
        if not self._events:
            waiting = sorted(task.owner for task in self._tasks)
            self.stuck = f"threads of ranks {waiting} wait without end, and nothing can happen any more"
            for owner in set(waiting):
                self.die(owner)
            return
        self.clock = max(self.clock, self._events[0][0])
        while self._events and self._events[0][0] <= self.clock:
            heapq.heappop(self._events)[2]()

    # Python's own, as far as an exchange uses them

    def _thread(
        self, target: Callable[..., Any], args: Sequence[Any] = (), name: str = "", daemon: bool = True
    ) -> _Thread:
        return _Thread(self, lambda: target(*args))

    def _condition(self) -> _Condition:
        return _Condition(self)

    def _queue(self) -> _Queue:
        return _Queue(self)


class _Thread:
    def __init__(self, world: World, work: Callable[[], None]):
        self.world, self.work = world, work
        self.task: Task | None = None

    def start(self) -> None:
        self.task = self.world.start(self.world.owner, self.work)

    def join(self, timeout: float | None = None) -> None:
        if task := self.task:
            self.world.wait(lambda: task.over, timeout, task.joining)


class _Condition:
    """Nobody runs beside whoever holds it, so there is nothing to hold."""

    def __init__(self, world: World):
        self.world = world
        self.place: Place = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        return self.world.wait(ready, timeout, self.place)

    def notify_all(self) -> None:
        self.world.notify(self.place)


class _Queue:
    def __init__(self, world: World):
        self.world = world
        self.items: deque[Any] = deque()
        self.place: Place = []

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.world.notify(self.place)

    def get(self) -> Any:
        self.world.wait(lambda: self.items, None, self.place)
        return self.items.popleft()
