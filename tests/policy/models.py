"""Obvious models of the eviction policies: lists from the oldest to the newest, no care for speed."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Model(ABC):
    """What every policy keeps: sizes of the resident blocks, and those nobody will ask for, latest last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: dict[bytes, int] = {}
        self.retired: list[bytes] = []

    @property
    @abstractmethod
    def queues(self) -> list[list[bytes]]: ...

    @abstractmethod
    def order(self) -> list[bytes]: ...

    @abstractmethod
    def add(self, key: bytes) -> None: ...

    @abstractmethod
    def touch(self, key: bytes) -> None: ...

    @abstractmethod
    def refresh(self, key: bytes) -> None: ...

    @abstractmethod
    def leave_ghost(self, key: bytes) -> None: ...

    @abstractmethod
    def limit(self) -> None: ...

    def insert(self, key: bytes, size: int) -> None:
        if key in self.sizes:
            self.refresh(key)
        else:
            self.sizes[key] = size
            self.add(key)

    def retire(self, key: bytes) -> None:
        if key in self.sizes:
            self.take(key)
            self.retired.append(key)

    def evict(self, key: bytes) -> None:
        self.leave_ghost(key)
        self.remove(key)
        self.limit()

    def remove(self, key: bytes) -> None:
        if key in self.sizes:
            self.take(key)
            del self.sizes[key]

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.limit()

    def take(self, key: bytes) -> None:
        for queue in [*self.queues, self.retired]:
            if key in queue:
                queue.remove(key)

    def total(self, queue: list[bytes]) -> int:
        return sum(self.sizes[key] for key in queue)


class SlowLRU(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.keys: list[bytes] = []

    @property
    def queues(self) -> list[list[bytes]]:
        return [self.keys]

    def order(self) -> list[bytes]:
        return self.retired[::-1] + self.keys

    def add(self, key: bytes) -> None:
        self.keys.append(key)

    def touch(self, key: bytes) -> None:
        if key in self.sizes:
            self.take(key)
            self.keys.append(key)

    refresh = touch

    def leave_ghost(self, key: bytes) -> None:
        pass

    def limit(self) -> None:
        pass


class SlowSLRU(Model):
    def __init__(self, capacity: int, protected: float, ghost: float) -> None:
        super().__init__(capacity)
        self.share, self.ghost = protected, ghost
        self.probation: list[bytes] = []
        self.protected: list[bytes] = []
        self.ghosts: dict[bytes, int] = {}
        self.evicted = 0

    @property
    def queues(self) -> list[list[bytes]]:
        return [self.probation, self.protected]

    def order(self) -> list[bytes]:
        return self.retired[::-1] + self.probation + self.protected

    def add(self, key: bytes) -> None:
        if key in self.ghosts and self.evicted - self.ghosts.pop(key) <= int(self.ghost * self.capacity):
            self.protected.append(key)
            self.limit_protected()
        else:
            self.probation.append(key)

    def touch(self, key: bytes) -> None:
        if key in self.sizes:
            self.take(key)
            self.protected.append(key)
            self.limit_protected()

    def refresh(self, key: bytes) -> None:
        if key in self.sizes:
            part = self.protected if key in self.protected else self.probation
            self.take(key)
            part.append(key)

    def leave_ghost(self, key: bytes) -> None:
        if key not in self.protected:
            self.ghosts[key] = self.evicted
            self.evicted += self.sizes[key]
            limit = int(self.ghost * self.capacity)
            self.ghosts = {k: born for k, born in self.ghosts.items() if self.evicted - born <= limit}

    def limit(self) -> None:
        self.limit_protected()

    def limit_protected(self) -> None:
        while self.total(self.protected) > int(self.share * self.capacity):
            self.probation.append(self.protected.pop(0))


class SlowS3FIFO(Model):
    def __init__(self, capacity: int, small: float, ghost: float) -> None:
        super().__init__(capacity)
        self.share, self.ghost = small, ghost
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.uses: dict[bytes, int] = {}
        self.ghosts: list[tuple[bytes, int]] = []

    @property
    def queues(self) -> list[list[bytes]]:
        return [self.small, self.main]

    def small_gives(self) -> bool:
        limit = int(self.share * self.capacity)
        return bool(self.small) and (not self.main or self.total(self.small) > limit)

    def order(self) -> list[bytes]:
        while self.small or self.main:
            queue = self.small if self.small_gives() else self.main
            uses = self.uses[queue[0]]
            if uses == 0:
                break
            self.uses[queue[0]] = 0 if queue is self.small else uses - 1
            self.main.append(queue.pop(0))
        first, second = (self.small, self.main) if self.small_gives() else (self.main, self.small)
        return self.retired[::-1] + sorted(first, key=self.uses.__getitem__) + sorted(second, key=self.uses.__getitem__)

    def add(self, key: bytes) -> None:
        self.uses[key] = 0
        known = key in [ghost for ghost, _ in self.ghosts]
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != key]
        (self.main if known else self.small).append(key)

    def touch(self, key: bytes) -> None:
        if key in self.sizes:
            self.uses[key] = min(3, self.uses[key] + 1)
            self.refresh(key)

    def refresh(self, key: bytes) -> None:
        if key in self.retired:
            self.take(key)
            self.small.append(key)

    def retire(self, key: bytes) -> None:
        super().retire(key)
        if key in self.sizes:
            self.uses[key] = 0

    def leave_ghost(self, key: bytes) -> None:
        if key in self.small:
            self.ghosts.append((key, self.sizes[key]))

    def limit(self) -> None:
        while sum(size for _, size in self.ghosts) > int(self.ghost * self.capacity):
            self.ghosts.pop(0)


class SlowARC(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.once: list[bytes] = []
        self.again: list[bytes] = []
        self.once_ghosts: list[tuple[bytes, int]] = []
        self.again_ghosts: list[tuple[bytes, int]] = []
        self.target = 0.0

    @property
    def queues(self) -> list[list[bytes]]:
        return [self.once, self.again]

    def order(self) -> list[bytes]:
        once, again, order = self.once.copy(), self.again.copy(), self.retired[::-1]
        while once or again:
            from_once = once and (not again or self.total(once) > self.target)
            order.append((once if from_once else again).pop(0))
        return order

    def add(self, key: bytes) -> None:
        size = self.sizes[key]
        once = sum(size for _, size in self.once_ghosts)
        again = sum(size for _, size in self.again_ghosts)
        if key in dict(self.once_ghosts):
            self.target = min(self.capacity, self.target + size * max(1, again / once))
            self.again.append(key)
        elif key in dict(self.again_ghosts):
            self.target = max(0, self.target - size * max(1, once / again))
            self.again.append(key)
        else:
            self.once.append(key)
        self.once_ghosts = [ghost for ghost in self.once_ghosts if ghost[0] != key]
        self.again_ghosts = [ghost for ghost in self.again_ghosts if ghost[0] != key]
        self.limit()

    def insert(self, key: bytes, size: int) -> None:
        super().insert(key, size)
        self.limit()

    def touch(self, key: bytes) -> None:
        if key in self.sizes:
            self.take(key)
            self.again.append(key)

    def refresh(self, key: bytes) -> None:
        if key in self.sizes:
            part = self.again if key in self.again else self.once
            self.take(key)
            part.append(key)

    def leave_ghost(self, key: bytes) -> None:
        for part, ghosts in ((self.once, self.once_ghosts), (self.again, self.again_ghosts)):
            if key in part:
                ghosts.append((key, self.sizes[key]))

    def limit(self) -> None:
        self.target = min(self.target, self.capacity)

        def size(ghosts: list[tuple[bytes, int]]) -> int:
            return sum(size for _, size in ghosts)

        while self.once_ghosts and self.total(self.once) + size(self.once_ghosts) > self.capacity:
            self.once_ghosts.pop(0)
        residents = self.total(self.once) + self.total(self.again)
        while self.again_ghosts and residents + size(self.once_ghosts) + size(self.again_ghosts) > 2 * self.capacity:
            self.again_ghosts.pop(0)
