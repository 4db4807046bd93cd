"""A maze of rooms with locked doors and keys, told in text."""

from __future__ import annotations

import random
from collections import deque

from trace_jax.tasks.environments import Step

MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
KEYS = ("red", "blue", "green", "gold")


class KeyMaze:
    """Rooms joined as a tree; locked doors on the way out open with keys that lie before them.

    Actions: north, south, east, west, take. One sees the room one stands in, so the way and the
    keys must be found and remembered.

    Args:
        width, height: rooms across and down.
        keys: locked doors on the way to the exit, 0 to 4.
    """

    def __init__(self, width: int = 3, height: int = 3, keys: int = 1):
        if not (1 <= width <= 8 and 1 <= height <= 8 and width * height >= 4):
            raise ValueError(f"maze is {width} by {height}: write 4 rooms or more, at most 8 by 8")
        if not 0 <= keys <= len(KEYS):
            raise ValueError(f"keys is {keys}: write 0 to {len(KEYS)}")
        self.width, self.height, self.keys = width, height, keys

    def reset(self, seed: int) -> str:
        rng = random.Random(f"maze {self.width} {self.height} {self.keys} {seed}")
        self._doors = _tree(rng, self.width, self.height)
        self._place, self._held = (rng.randrange(self.width), rng.randrange(self.height)), set()
        way = _ways(self._doors, self._place)
        self._exit = max(sorted(way), key=lambda room: len(way[room]))
        self._locks, self._lying = self._lock_doors(rng, way[self._exit])
        return "Find the exit. Say north, south, east, west or take.\n" + self._look()

    def _lock_doors(self, rng: random.Random, path: list) -> tuple[dict, dict]:
        """Locks spread over the path, each key somewhere reachable without its door."""
        rooms = [self._place, *path]
        cuts = sorted(rng.sample(range(len(path)), min(self.keys, len(path))))
        locks = {frozenset(rooms[c : c + 2]): KEYS[k] for k, c in enumerate(cuts)}
        lying: dict = {}
        for k in range(len(cuts)):
            closed = {frozenset(rooms[c : c + 2]) for c in cuts[k:]}
            near = sorted(_ways(self._doors, self._place, closed))
            lying.setdefault(rng.choice(near), set()).add(KEYS[k])
        return locks, lying

    def _look(self) -> str:
        doors = []
        for name, (dx, dy) in MOVES.items():
            there = (self._place[0] + dx, self._place[1] + dy)
            if there in self._doors[self._place]:
                lock = self._locks.get(frozenset((self._place, there)))
                doors.append(name + (f" ({lock} lock)" if lock else ""))
        text = f"Doors: {', '.join(doors)}."
        if lying := self._lying.get(self._place):
            text += f" Here: {', '.join(sorted(lying))} key."
        if self._held:
            text += f" You hold: {', '.join(sorted(self._held))}."
        return text

    def step(self, action: str) -> Step:
        word = action.strip().lower()
        if word == "take" and self._lying.get(self._place):
            self._held |= self._lying.pop(self._place)
            return Step("Taken. " + self._look())
        if word not in MOVES:
            return Step("That does nothing. " + self._look())
        there = (self._place[0] + MOVES[word][0], self._place[1] + MOVES[word][1])
        if there not in self._doors[self._place]:
            return Step("No door there. " + self._look())
        lock = self._locks.get(frozenset((self._place, there)))
        if lock and lock not in self._held:
            return Step(f"Locked: it needs the {lock} key. " + self._look())
        self._place = there
        if there == self._exit:
            return Step("You are out.", 1.0, True)
        return Step(self._look())

    def solution(self) -> list[str]:
        """A shortest list of actions from here to the exit; for tests and warm starts."""
        start = (self._place, frozenset(self._held))
        seen, queue = {start}, deque([(start, [])])
        while queue:
            (place, held), actions = queue.popleft()
            if place == self._exit:
                return actions
            nexts = []
            if (found := self._lying.get(place)) and not found <= held:
                nexts.append(((place, held | found), "take"))
            for name, (dx, dy) in MOVES.items():
                there = (place[0] + dx, place[1] + dy)
                lock = self._locks.get(frozenset((place, there)))
                if there in self._doors[place] and (lock is None or lock in held):
                    nexts.append(((there, held), name))
            for state, name in nexts:
                if state not in seen:
                    seen.add(state)
                    queue.append((state, [*actions, name]))
        raise AssertionError("a maze without a way out")


def _tree(rng: random.Random, width: int, height: int) -> dict[tuple, set]:
    """A random spanning tree of the grid: room to its neighbours behind doors."""
    doors: dict[tuple, set] = {(x, y): set() for x in range(width) for y in range(height)}
    start = rng.choice(sorted(doors))
    seen, stack = {start}, [start]
    while stack:
        x, y = stack[-1]
        near = [(x + dx, y + dy) for dx, dy in MOVES.values()]
        fresh = [room for room in near if room in doors and room not in seen]
        if not fresh:
            stack.pop()
            continue
        room = rng.choice(fresh)
        doors[x, y].add(room)
        doors[room].add((x, y))
        seen.add(room)
        stack.append(room)
    return doors


def _ways(doors: dict, start: tuple, closed: set = frozenset()) -> dict[tuple, list]:
    """Every reachable room with the rooms on the way to it."""
    ways, queue = {start: []}, deque([start])
    while queue:
        room = queue.popleft()
        for there in sorted(doors[room]):
            if there not in ways and frozenset((room, there)) not in closed:
                ways[there] = [*ways[room], there]
                queue.append(there)
    return ways
