"""What the models of the GPU pipelines are made of: barriers, rings, products, and schedules by chance.

Whoever runs beside others is a generator: each yield is a moment at which others may go on. What goes wrong is a
sentence in a list of faults.
"""

import bisect
import collections
import itertools

WARPS = 2  # of a warpgroup, in models that know warps


class Mbarrier:
    """Completes a phase with every `count` arrivals; a wait is for the parity of a phase."""

    def __init__(self, count):
        self.count = self.pending = count
        self.phase = 0

    def arrive(self):
        self.pending -= 1
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def done(self, parity):
        return self.phase % 2 != parity


class Ring:
    """Buffers that the producer fills one after another, each of so many writers its part, and that so many warpgroups
    release. It knows which item lies where."""

    def __init__(self, stages, groups, faults, writers=1):
        self.full = [Mbarrier(writers) for _ in range(stages)]
        self.empty = [Mbarrier(groups) for _ in range(stages)]
        self.readers = [set() for _ in range(stages)]
        self.content = [None] * stages
        self.stages, self.faults = stages, faults

    def wait_full(self, i):
        while not self.full[i % self.stages].done(i // self.stages % 2):
            yield

    def release(self, i):
        self.empty[i % self.stages].arrive()

    def claim(self, i):
        while not self.empty[i % self.stages].done(i // self.stages % 2 ^ 1):
            yield

    def fill(self, i, what=None):
        yield from self.claim(i)
        self.land(i, what)

    def land(self, i, what=None):
        """What a writer has asked for, of a buffer that it has claimed, is there."""
        self.faults += [f"(reader, item) {reader} is overwritten" for reader in self.readers[i % self.stages]]
        barrier = self.full[i % self.stages]
        phase = barrier.phase
        barrier.arrive()
        self.content[i % self.stages] = i if barrier.phase > phase else None
        self.said = what

    def read(self, reader, i):
        if self.content[i % self.stages] != i:
            self.faults.append(f"{reader} reads item {i} before it is there")
        self.readers[i % self.stages].add((reader, i))

    def done(self, reader, i):
        self.readers[i % self.stages].discard((reader, i))


class Exchange:
    """A ring that warps fill, each its part: dS or a piece of dQ."""

    def __init__(self, name, stages, writers, readers, faults):
        self.name, self.stages, self.writers, self.faults = name, stages, writers, faults
        self.full = [Mbarrier(len(writers)) for _ in range(stages)]
        self.empty = [Mbarrier(readers) for _ in range(stages)]
        self.content = [{} for _ in range(stages)]
        self.readers = [set() for _ in range(stages)]

    def claim(self, i):
        while not self.empty[i % self.stages].done(i // self.stages % 2 ^ 1):
            yield

    def write(self, writer, i, what=None):
        if readers := self.readers[i % self.stages]:
            self.faults.append(f"{self.name} is written while {readers} reads it")
        self.content[i % self.stages][writer] = (i, what)

    def wait_full(self, i):
        while not self.full[i % self.stages].done(i // self.stages % 2):
            yield

    def read(self, reader, i):
        """What lies there: of every writer the same."""
        parts = [self.content[i % self.stages].get(writer, (None, None)) for writer in self.writers]
        if any(part[0] != i or part != parts[0] for part in parts):
            self.faults.append(f"{self.name} is not whole when {reader} reads item {i}")
        self.readers[i % self.stages].add(reader)
        return parts[0][1]

    def done(self, reader, i):
        self.readers[i % self.stages].discard(reader)

    def release(self, i):
        self.empty[i % self.stages].arrive()


class Sums:
    """What two blocks of a cluster send each other: a room in each. waits: until the other one has read the last."""

    def __init__(self, faults, waits=True):
        self.full, self.empty = [Mbarrier(1), Mbarrier(1)], [Mbarrier(1), Mbarrier(1)]
        self.room, self.count = [None, None], [0, 0]
        self.faults, self.waits = faults, waits

    def add(self, block):
        n, other = self.count[block], 1 - block
        while self.waits and not self.empty[block].done(n % 2 ^ 1):
            yield
        if self.room[other] is not None:
            self.faults.append(f"sum {self.room[other]} is overwritten")
        self.room[other] = n
        self.full[other].arrive()
        yield
        while not self.full[block].done(n % 2):
            yield
        if self.room[block] != n:
            self.faults.append(f"block {block} reads sum {n} before it is there")
        yield
        self.room[block] = None
        self.empty[other].arrive()
        self.count[block] += 1


class Turn:
    """A named barrier, here of two warpgroups: one takes its turn, the other has passed it."""

    def __init__(self, count=2):
        self.count = count
        self.arrived = self.generation = 0

    def arrive(self):
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.generation = 0, self.generation + 1

    def take(self):
        generation = self.generation
        self.arrive()
        while self.generation == generation:
            yield


class Products:
    """What warpgroups multiply: a product reads from when so many warps have issued it until one has waited for it."""

    def __init__(self, start):
        self.start = start
        self.issued = collections.Counter()

    def issue(self, group, name, reads):
        """A warp issues its part of a product: reads = [(ring, item)]."""
        self.issued[group, name] += 1
        if self.issued[group, name] == self.start:
            for ring, i in reads:
                ring.read((group, name), i)

    def wait(self, group, name, reads):
        while self.issued[group, name] < WARPS:
            yield
        for ring, i in reads:
            ring.done((group, name), i)


def run(schedule, running, steps, faults, speeds=(1, 1, 5, 25)):
    """Lets all go on by turns, each at one of these speeds; what goes wrong, empty: nothing."""
    weights = [schedule.choice(speeds) for _ in running]
    sums = list(itertools.accumulate(weights))
    for _ in range(steps):
        at = bisect.bisect(sums, schedule.random() * sums[-1], hi=len(sums) - 1)
        if next(running[at], "over") == "over":
            del running[at], weights[at]
            sums = list(itertools.accumulate(weights))
        if faults:
            return faults[0]
        if not running:
            return ""
    return f"{len(running)} wait for ever"
