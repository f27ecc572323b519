"""Threads that run one at a time, in virtual time: what happens is a pure function of a seed.

    wait     hands on to one of those who can go on, chosen by the dice; if nobody can, time passes to the next event
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
from typing import Any

from paceline import contract

STUCK_S = 60.0  # of real time: whoever computes longer than this without waiting is lost


class Killed(BaseException):
    """Nothing of this rank runs any more. No program catches it."""


def _shut() -> threading.Lock:
    """Whoever acquires it waits until somebody else releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Task:
    """One thread's part. ``owner``: whose it is; a thread that it starts is of the same."""

    def __init__(self, owner: int, work: Callable[[], None]):
        self.owner, self.work = owner, work
        self.turn = _shut()
        self.ready: Callable[[], Any] = lambda: True
        self.until = math.inf
        self.over = False


class World(contract.Threads):
    """Virtual time, and whose turn it is. To be used as `contract.Threads` by all that runs in it."""

    def __init__(self, seed: int = 0):
        self.dice = random.Random(seed)
        self.clock = 0.0
        self.dead: set[int] = set()
        self.stalled: dict[int, float] = {}  # by owner: until when
        self.stuck = ""  # who waited for what, if everyone waited without end
        self.error: BaseException | None = None
        self._tasks: list[Task] = []
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

    def wait(self, ready: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Until ``ready()`` is true, or for so many virtual seconds. Returns which of them it was."""
        me = self._running
        assert me
        if me.owner in self.dead:
            raise Killed
        me.ready, me.until = ready, math.inf if timeout_s is None else self.clock + timeout_s
        self._hand_on(me)
        if me.owner in self.dead:
            raise Killed
        return bool(ready())

    def yield_(self) -> None:
        """Others may run first."""
        self.wait(lambda: True)

    def after(self, delay_s: float, happens: Callable[[], Any]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.clock + delay_s, self._number, happens))

    def start(self, owner: int, work: Callable[[], None]) -> Task:
        task = Task(owner, work)
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task,), daemon=True).start()
        return task

    def run(self) -> None:
        """Lets all that was started run to its end. Raises what any of it raised."""
        if not self._tasks:
            return
        first = self._next()
        self._running = first
        first.turn.release()
        if not self._ended.acquire(timeout=STUCK_S):
            raise TimeoutError(f"a thread of rank {self.owner} has been computing for {STUCK_S:.0f} s")
        if self.error:
            raise self.error

    # whose turn it is

    def _run(self, task: Task) -> None:
        task.turn.acquire()
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
            self._running = following = self._next() if self._tasks else None
            (following.turn if following else self._ended).release()

    def _hand_on(self, me: Task) -> None:
        following = self._next()
        if following is not me:
            self._running = following
            following.turn.release()
            me.turn.acquire()

    def _next(self) -> Task:
        while True:
            first = self.dice.randrange(len(self._tasks))
            for task in self._tasks[first:] + self._tasks[:first]:
                if self._can(task):
                    return task
            self._pass()

    def _can(self, task: Task) -> bool:
        if task.owner in self.dead:
            return True  # to end
        if self.stalled.get(task.owner, 0.0) > self.clock:
            return False
        return self.clock >= task.until or bool(task.ready())

    def _pass(self) -> None:
        """Time goes to the next thing that happens."""
        times = [self._events[0][0]] if self._events else []
        for task in self._tasks:
            stalled = self.stalled.get(task.owner, 0.0)
            times.append(stalled if stalled > self.clock else task.until)
        if math.isinf(min(times)):
            waiting = sorted(task.owner for task in self._tasks)
            self.stuck = f"threads of ranks {waiting} wait without end, and nothing can happen any more"
            self.dead.update(waiting)
            return
        self.clock = min(times)
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
        self.world.wait(lambda: self.task is None or self.task.over, timeout)


class _Condition:
    """Nobody runs beside whoever holds it, so there is nothing to hold; who waits is asked, not woken."""

    def __init__(self, world: World):
        self.world = world

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        return True if ready() else self.world.wait(ready, timeout)

    def notify_all(self) -> None:
        pass


class _Queue:
    def __init__(self, world: World):
        self.world = world
        self.items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self) -> Any:
        if not self.items:
            self.world.wait(lambda: self.items)
        return self.items.popleft()
