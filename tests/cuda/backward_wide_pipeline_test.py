"""The pipeline of the Hopper backward kernel whose warpgroups have roles, as a model like backward_pipeline_test.py.

One producer (src/cuda/sm90/backward_producer.h) and two warpgroups of two warps (backward_wide.h): one makes P and
dV, the other dS and dK, each a part of dQ. One buffer each of K and V, two or three of Q and dO, one of P, two of
dS. What the warpgroups hand over is ordered by two named barriers alone: who has P ready arrives at one, who has dS
ready at the other. Scores of the next step and a step's last piece of dQ are under way across its end. There are
tiles without rows, and the end of work.

Two blocks of a cluster, each with all of that, exchange scores warp by warp, step by step. They may have one buffer of
dO: then the values give it back as soon as dV is there, and the keys ask for their next scores last.

A product reads from when the first warp of its warpgroup issues it until one has waited for it; shifts, deltas, P
and what is said of a tile are read by each warp. No schedule may end with everybody waiting, nothing may be filled
or written while somebody reads it, or read before it is there. What each of FAULTS breaks must be seen.

(Shifts and deltas released early would go unseen, as the other warpgroup releases the same buffers later; and V, as
the producer fills it before the first dO, which is waited for.)
"""

import collections
import random
import sys

from pipeline_model import WARPS, Exchange, Products, Ring, Sums, Turn, run

VALUES, KEYS = 0, 1
ROLES = 2
ENOUGH = 5  # times that a breakage is seen
MOST_ROUNDS = 5
FAULTS = {  # what is broken, as the model may see it
    "P is not waited for": ("P is not whole", "wait for ever"),
    "dS is not waited for": ("dS is not whole",),
    "dS is ready before all its warps have stored": ("dS is not whole", "wait for ever"),
    "one buffer of dS": ("dS is written while", "dS is not whole"),
    "the last dQ is not waited for": ("dS is written while", "overwritten"),
    "Q is released before dK": ("overwritten",),
    "dO is released before dV": ("overwritten",),
    "the keys do not meet before dQ": ("dS is not whole",),
    "a tile is released before its last warp": ("overwritten",),
    "scores are sent before the last ones have been read": ("sum",),
}


class Block(Products):
    """sums: those of the cluster's warps, by role and warp, if there is one; number: of the block."""

    def __init__(self, stages, broken, faults, dout_stages=None, sums=None, number=0):
        super().__init__(start=1)
        self.broken, self.faults, self.sums, self.number = broken, faults, sums, number
        self.k, self.v = Ring(1, ROLES, self.faults), Ring(1, ROLES, self.faults)
        self.q = Ring(stages, ROLES, self.faults)
        self.dout = Ring(dout_stages or stages, ROLES, self.faults)
        self.one_dout = dout_stages == 1
        warps = {role: [(role, warp) for warp in range(WARPS)] for role in (VALUES, KEYS)}
        # A warp reads the part of P that the same one of the values has stored.
        self.weights = [Exchange("P", 1, [warps[VALUES][warp]], 1, self.faults) for warp in range(WARPS)]
        self.scores = Exchange("dS", 1 if broken == "one buffer of dS" else 2, warps[KEYS], 2, self.faults)
        self.weights_ready, self.scores_ready = Turn(2 * WARPS), Turn(2 * WARPS)
        self.own = [Turn(WARPS), Turn(WARPS)]


def produce(tiles, block):
    item = 0
    for tile, rows in enumerate(tiles):
        yield from block.k.fill(tile, rows)
        values_wait = True
        for _ in range(rows):
            yield from block.q.fill(item)
            if values_wait:
                yield from block.v.fill(tile)
            values_wait = False
            yield from block.dout.fill(item)
            item += 1
        if values_wait:
            yield from block.v.fill(tile)
    yield from block.k.fill(len(tiles))  # there are no more


class Warp:
    def __init__(self, role, warp, block):
        self.role, self.me, self.warp, self.leads = role, (role, warp), warp, warp == 0
        self.block, self.broken = block, block.broken
        self.item = 0
        # What the scores are made from and what the sum is made from.
        self.scored, self.summed = ((block.q, block.dout) if role == VALUES else (block.dout, block.q))

    def products(self, tile, item):
        b = self.block
        return {"scores": [(b.k if self.role == VALUES else b.v, tile), (self.scored, item)],
                "sum": [(self.summed, item)], "first dQ": [(b.scores, item), (b.k, tile)],
                "last dQ": [(b.scores, item), (b.k, tile)]}

    def issue(self, name, tile, item):
        self.block.issue(self.role, (name, item), self.products(tile, item)[name])

    def wait(self, name, tile, item):
        yield from self.block.wait(self.role, (name, item), self.products(tile, item)[name])

    def issue_scores(self, tile, item):
        yield from self.scored.wait_full(item)
        self.issue("scores", tile, item)

    def take_scores(self, tile, item):
        yield from self.wait("scores", tile, item)
        if self.block.sums:
            yield from self.block.sums[self.me].add(self.block.number)

    def hand_over_weights(self):
        b, item = self.block, self.item
        b.q.read(self.me, item)  # the shifts
        yield
        b.q.done(self.me, item)
        b.weights[self.warp].write(self.me, item)
        yield
        b.weights_ready.arrive()

    def hand_over_scores(self):
        b, item, broken = self.block, self.item, self.broken
        if broken == "P is not waited for":
            b.weights_ready.arrive()
        else:
            yield from b.weights_ready.take()
        b.dout.read(self.me, item)  # the deltas
        b.weights[self.warp].read(self.me, item)
        yield
        b.weights[self.warp].done(self.me, item)
        b.dout.done(self.me, item)
        if broken == "dS is ready before all its warps have stored":
            b.scores_ready.arrive()
        yield
        b.scores.write(self.me, item)
        if broken != "dS is ready before all its warps have stored":
            b.scores_ready.arrive()

    def step(self, tile, n, rows):
        b, item, broken = self.block, self.item, self.broken
        yield from (self.hand_over_weights() if self.role == VALUES else self.hand_over_scores())
        if n > 0 and broken != "the last dQ is not waited for":
            yield from self.wait("last dQ", tile, item - 1)
        yield from self.summed.wait_full(item)
        self.issue("sum", tile, item)
        early = f"{'dO' if self.role == VALUES else 'Q'} is released before {'dV' if self.role == VALUES else 'dK'}"
        if self.leads and broken == early:
            self.summed.release(item)
        scores_late = b.one_dout and self.role == KEYS
        if n + 1 < rows and not scores_late:
            yield from self.issue_scores(tile, item + 1)
        yield
        sum_early = b.one_dout and self.role == VALUES
        if sum_early:
            yield from self.wait("sum", tile, item)
            if self.leads and broken != early:
                self.summed.release(item)
        if self.role == KEYS and broken != "the keys do not meet before dQ":
            yield from b.own[KEYS].take()
        elif self.role == VALUES and broken == "dS is not waited for":
            b.scores_ready.arrive()
        elif self.role == VALUES:
            yield from b.scores_ready.take()
        if self.leads:
            self.scored.release(item)
        self.issue("first dQ", tile, item)
        yield
        if not sum_early:
            yield from self.wait("sum", tile, item)
            if self.leads and broken != early:
                self.summed.release(item)
        yield from self.wait("first dQ", tile, item)
        self.issue("last dQ", tile, item)
        if n + 1 < rows:
            if scores_late:
                yield from self.issue_scores(tile, item + 1)
            yield from self.take_scores(tile, item + 1)
        self.item += 1

    def run(self):
        b, tile = self.block, 0
        while True:
            yield from b.k.wait_full(tile)
            rows = b.k.said
            if rows is None:
                return
            b.k.read(self.me, tile)  # what is said of the tile
            if self.role == KEYS:
                yield from b.v.wait_full(tile)
            if rows > 0:
                yield from self.issue_scores(tile, self.item)
                yield from self.take_scores(tile, self.item)
                for n in range(rows):
                    yield from self.step(tile, n, rows)
                yield from self.wait("last dQ", tile, self.item - 1)
            if self.broken == "a tile is released before its last warp" and self.leads:
                b.k.release(tile)
                b.v.release(tile)
            yield  # what is said is read a last time
            b.k.done(self.me, tile)
            yield from b.own[self.role].take()
            if self.broken != "a tile is released before its last warp" and self.leads:
                b.k.release(tile)
                b.v.release(tile)
            yield  # writes dK or dV
            tile += 1


def fault(seed, tiles, stages, broken="", pair=False):
    """What goes wrong under one random schedule; empty: nothing. pair: of two blocks."""
    schedule = random.Random(seed)
    faults = []
    blocks = [Block(stages, broken, faults)]
    if pair:
        sums = {(role, warp): Sums(faults, broken != "scores are sent before the last ones have been read")
                for role in (VALUES, KEYS) for warp in range(WARPS)}
        blocks = [Block(2, broken, faults, 1 + seed % 2, sums, number) for number in range(2)]
    running = []
    for block in blocks:
        running.append(produce(tiles, block))
        running += [Warp(role, warp, block).run() for role in (VALUES, KEYS) for warp in range(WARPS)]
    return run(schedule, running, 3000 * len(blocks) * (sum(tiles) + len(tiles) + 1), faults)


TILES = [[4, 4], [1, 1, 1, 1], [2, 3, 1, 5], [0, 2, 0, 0, 3, 1, 0], [0, 0], [7], []]


def main():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seed {first}")
    seen = collections.Counter()
    # A breakage shows under some schedules only: another round for what no schedule of a round has shown.
    for rounds in range(1, MOST_ROUNDS + 1):
        for tiles in TILES:
            for seed in range(first + rounds * 1000, first + rounds * 1000 + 60):
                stages = 2 + seed % 2
                for pair in (False, True) if seed % 4 < 2 else (False,):
                    if found := fault(seed, tiles, stages, pair=pair):
                        sys.exit(f"tiles {tiles}, {stages} stages, {'a pair, ' if pair else ''}seed {seed}: {found}")
                for broken, hows in FAULTS.items():
                    if seen[broken] < ENOUGH:
                        pair = "sent" in broken or seed % 3 == 0
                        seen[broken] += any(how in fault(seed, tiles, stages, broken, pair) for how in hows)
        if not (unseen := FAULTS.keys() - (+seen).keys()):
            break
    else:
        sys.exit(f"went unseen: {unseen}")
    print(f"{rounds * 60 * len(TILES)} schedules; seen: {dict(seen)}")


if __name__ == "__main__":
    main()
