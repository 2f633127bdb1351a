"""The Hopper backward kernel's pipeline as a model, like the forward's (pipeline_test.py).

One producer (src/cuda/sm90/backward_producer.h), two warpgroups of two warps (backward.h), one buffer each of
K and V, two of Q and dO, two of dS, which both warpgroups write and both read; blocks of keys that no row
sees, and the end of work. A product reads from when all warps of its warpgroup have issued it until one has
waited for it; shifts, deltas and what is said of a tile are read by each warp. One warp releases for its
warpgroup. No schedule may end with everybody waiting, nothing may be filled or written while somebody reads
it, or read before it is there. What each of FAULTS breaks must be seen, or the model would prove nothing.

(dO released too early alone would go unseen, and V: the producer fills them after Q and K, which are kept.)
"""

import collections
import random
import sys

import pipeline_test
from pipeline_test import Turn

GROUPS, WARPS = 2, 2
FAULTS = {
    "one buffer of dS": "dS is written while",
    "dS is not waited for": "before it is there",
    "K is released before dQ": "overwritten",
    "Q is released before dK": "overwritten",
    "Q and dO are released before dV": "'dV'",
    "a tile is released before its last warp": "overwritten",
    "V comes after all rows": "wait for ever",
    "a tile without rows is not released": "wait for ever",
}


class Ring(pipeline_test.Ring):
    """One that knows which item lies in a buffer."""

    def __init__(self, stages, faults):
        super().__init__(stages, GROUPS)
        self.content = [None] * stages
        self.faults = faults

    def fill(self, i):
        overwritten = []
        yield from super().fill(i, overwritten)
        self.faults += [f"(reader, item) {reader} is overwritten" for reader in overwritten]
        self.content[i % self.stages] = i

    def read(self, reader, i):
        if self.content[i % self.stages] != i:
            self.faults.append(f"{reader} reads item {i} before it is there")
        self.readers[i % self.stages].add((reader, i))

    def done(self, reader, i):
        self.readers[i % self.stages].discard((reader, i))


class Scores:
    """dS: a part of every warp."""

    def __init__(self, buffers, faults):
        self.content = [collections.defaultdict(lambda: None) for _ in range(buffers)]
        self.readers = [set() for _ in range(buffers)]
        self.faults = faults

    def write(self, writer, i):
        if readers := self.readers[i % len(self.readers)]:
            self.faults.append(f"dS is written while {readers} reads it")
        self.content[i % len(self.content)][writer] = i

    def read(self, reader, i):
        parts = self.content[i % len(self.content)]
        if [parts[g, w] for g in range(GROUPS) for w in range(WARPS)] != [i] * GROUPS * WARPS:
            self.faults.append(f"{reader} reads dS of item {i} before it is there")
        self.readers[i % len(self.readers)].add(reader)

    def done(self, reader, i):
        self.readers[i % len(self.readers)].discard(reader)


class Shared:
    """Shared memory of a block."""

    def __init__(self, broken):
        self.faults = []
        self.k, self.v = Ring(1, self.faults), Ring(1, self.faults)
        self.q, self.dout = Ring(2, self.faults), Ring(2, self.faults)
        self.scores = Scores(1 if broken == "one buffer of dS" else 2, self.faults)
        self.all = Turn(GROUPS * WARPS)
        self.group = [Turn(WARPS) for _ in range(GROUPS)]
        self.issued = collections.Counter()

    def issue(self, group, name, reads):
        """A warp issues its part of a product: reads = [(ring, item)]."""
        self.issued[group, name] += 1
        if self.issued[group, name] == WARPS:
            for ring, i in reads:
                ring.read((group, name), i)

    def wait(self, group, name, reads):
        while self.issued[group, name] < WARPS:
            yield
        for ring, i in reads:
            ring.done((group, name), i)


def produce(tiles, shared, broken):
    item = 0
    for tile, blocks in enumerate(tiles):
        yield from shared.k.fill(tile)
        values_wait = True
        for _ in range(blocks):
            yield from shared.q.fill(item)
            if values_wait and broken != "V comes after all rows":
                yield from shared.v.fill(tile)
                values_wait = False
            yield from shared.dout.fill(item)
            item += 1
        if values_wait:
            yield from shared.v.fill(tile)
    yield from shared.k.fill(len(tiles))  # says that there are no more


def consume(group, warp, tiles, shared, broken):
    me, leads = (group, warp), warp == 0
    k, v, q, dout, scores = shared.k, shared.v, shared.q, shared.dout, shared.scores
    item = 0
    for tile, blocks in enumerate(tiles):
        yield from k.wait_full(tile)
        k.read(me, tile)  # what is said of the tile
        yield from v.wait_full(tile)
        for n in range(blocks):
            last = leads and n == blocks - 1
            products = {"S": [(k, tile), (q, item)], "dP": [(v, tile), (dout, item)], "dV": [(dout, item)],
                        "dQ": [(scores, item), (k, tile)], "dK": [(q, item)]}

            def issue(name):
                shared.issue(group, (name, item), products[name])

            def wait(name):
                return shared.wait(group, (name, item), products[name])

            yield from q.wait_full(item)
            issue("S")
            yield from dout.wait_full(item)
            issue("dP")
            yield from wait("S")
            q.read(me, item)  # the shifts
            yield
            q.done(me, item)
            yield from wait("dP")
            dout.read(me, item)  # the deltas
            yield
            dout.done(me, item)
            scores.write(me, item)
            issue("dV")
            if leads and broken == "Q and dO are released before dV":
                q.release(item)
                dout.release(item)
            yield
            if broken != "dS is not waited for":
                yield from shared.all.take()
            if last and broken == "K is released before dQ":
                k.release(tile)
            if leads and broken == "Q is released before dK":
                q.release(item)
            issue("dQ")
            issue("dK")
            yield
            yield from wait("dV")
            yield from wait("dQ")
            if leads and broken != "Q and dO are released before dV":
                dout.release(item)
            yield
            yield from wait("dK")
            if leads and "Q " not in broken:
                q.release(item)
            item += 1
        yield  # writes dK and dV
        if broken != "a tile is released before its last warp":
            k.done(me, tile)
            yield from shared.group[group].take()
        if leads and not (blocks == 0 and broken == "a tile without rows is not released"):
            if blocks == 0 or broken != "K is released before dQ":
                k.release(tile)
            v.release(tile)
        k.done(me, tile)
    yield from k.wait_full(len(tiles))


def fault(seed, tiles, broken=""):
    """What goes wrong under one random schedule; empty: nothing."""
    schedule = random.Random(seed)
    shared = Shared(broken)
    running = [produce(tiles, shared, broken)]
    running += [consume(g, w, tiles, shared, broken) for g in range(GROUPS) for w in range(WARPS)]
    weights = [schedule.choice((1, 1, 4)) for _ in running]  # some are slow
    for _ in range(4000 * (sum(tiles) + len(tiles) + 1)):
        at = schedule.choices(range(len(running)), weights)[0]
        if next(running[at], "over") == "over":
            del running[at], weights[at]
        if shared.faults:
            return shared.faults[0]
        if not running:
            return ""
    return f"{len(running)} wait for ever"


def main():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seed {first}")
    runs, seen = 0, collections.Counter()
    for tiles in ([4] * 4, [1] * 6, [2, 3, 1, 5, 2], [0, 2, 0, 0, 0, 3, 1, 0], [0, 0, 0], [7], []):
        for seed in range(first, first + 60):
            runs += 1
            if found := fault(seed, tiles):
                sys.exit(f"tiles {tiles}, seed {seed}: {found}")
            if seed >= first + 12:
                continue
            for broken, how in FAULTS.items():
                seen[broken] += how in fault(seed, tiles, broken)
    if unseen := FAULTS.keys() - (+seen).keys():
        sys.exit(f"went unseen: {unseen}")
    print(f"{runs} schedules; seen: {dict(seen)}")


if __name__ == "__main__":
    main()
