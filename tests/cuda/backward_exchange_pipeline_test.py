"""The pipeline of the Hopper backward kernel whose blocks exchange dS, as a model like backward_wide_pipeline_test.py.

Two blocks of a cluster, each with a producer (src/cuda/sm90/backward_producer.h) and two warpgroups of two warps
(backward_exchange.h): the values make P and dV, the keys dS and dK, each a part of dQ. There is one buffer each of K,
V, dO and P, two of Q, of dS and of the other block's dS, which each warp there sends by the copy engine. dQ of a step
is issued in the next one, and added in the one after that. Both blocks have the same tiles, some without rows, which
one hands on to the other; each goes at its own pace until the end of work.

Products are under way in the order of their commits until a wait leaves fewer. One reads from when the first warp of
its warpgroup issues it until one has waited for it, and a wait is for what all warps issue. Shifts, deltas, P, orders
and what is said of a tile are read by each warp. No schedule may end with everybody waiting; nothing may be filled or
written while somebody reads it, or read before it is there, nor a result taken that is under way, nor a block end to
which the other one still writes. What each of FAULTS breaks must be seen.

(Masked: the keys meet for dO alone, not for their own dQ, which they issue after the next kWeightsReady or, of a tile's
last step, after a wait for dK, which each warp issues after its dS. Shifts released early would go unseen, as the keys
release Q later; and V, as in the other model.)
"""

import collections
import random
import sys

from pipeline_model import WARPS, Exchange, Mbarrier, Products, Ring, Turn, run

VALUES, KEYS = ROLES = 0, 1
BLOCKS, STAGES = 2, 2
ENOUGH, EACH, MOST_ROUNDS = 5, 120, 5  # times that a breakage is seen, schedules of a round, rounds
FAULTS = {  # what is broken, as the model may see it
    "P is not waited for": ("P is not whole",),
    "P is stored before the last one is read": ("P is written while",),
    "dS is not waited for": ("dS is not whole when (0",),
    "dS is ready before all its warps have stored": ("dS is not whole when (0",),
    "one buffer of dS": ("dS is written while", "dS is not whole"),
    "P is handed over before dQ": ("dS is written while",),
    "the other block's buffer is not claimed": ("received is written while", "received is not whole"),
    "received is not waited for": ("received is not whole",),
    "received is given back before dQ": ("received is written while",),
    "dQ is added before it is there": ("dQ is taken",),
    "scores are not waited for": ("scores is taken",),
    "Q is released before dK": ("overwritten",),
    "dO is released before dV": ("overwritten",),
    "the keys do not meet before dO is released": ("overwritten",),
    "a tile is released before its last warp": ("overwritten",),
    "room for four orders": ("order",),
    "a block does not wait for the other to end": ("has ended",),
}


class Block(Products):
    def __init__(self, handed, end, broken, faults):
        super().__init__(start=1)
        self.handed, self.end, self.broken, self.faults, self.other = handed, end, broken, faults, None
        self.k, self.v, self.q, self.dout = (Ring(stages, len(ROLES), faults) for stages in (1, 1, STAGES, 1))
        # A warp reads the part of P that the same one of the values has stored, and sends its own part of dS.
        self.weights = [Exchange("P", 1, [(VALUES, warp)], 1, faults) for warp in range(WARPS)]
        stages = 1 if broken == "one buffer of dS" else STAGES
        self.scores = [Exchange("dS", stages, [(KEYS, warp)], 1, faults) for warp in range(WARPS)]
        self.sent = set()  # (warp, item)
        # The other block's dS: full when its warps' parts are there and a thread here has said how much comes.
        self.received = Exchange("received", STAGES, [(KEYS, warp) for warp in range(WARPS)], len(ROLES), faults)
        self.received.full = [Mbarrier(WARPS + 1) for _ in range(STAGES)]
        self.weights_ready, self.scores_ready, self.own = Turn(2 * WARPS), Turn(2 * WARPS), [Turn(WARPS), Turn(WARPS)]
        self.at_work, self.orders = len(ROLES) * WARPS, [None] * (4 if broken == "room for four orders" else 8)


def produce(tiles, block, hands_on):
    item = 0
    for tile, rows in enumerate([*tiles, None]):  # None: there are no more
        yield from block.handed.fill(tile) if hands_on else block.handed.wait_full(tile)
        if not hands_on:
            block.handed.release(tile)
        yield from block.k.fill(tile, rows)
        if rows == 0:
            yield from block.v.fill(tile)
        for n in range(rows or 0):
            yield from block.q.claim(item)
            block.orders[item % len(block.orders)] = item  # says where its dQ goes
            block.q.land(item)
            if n == 0:
                yield from block.v.fill(tile)
            yield from block.dout.fill(item)
            item += 1


def send(block, warp, buffer, items):
    """The copy engine, with what a warp sends from one buffer: what it sends from the other may overtake it."""
    scores, there = block.scores[warp], block.other.received
    for item in range(buffer, items, STAGES):
        while (warp, item) not in block.sent:
            yield
        scores.read("the engine", item)
        there.write((KEYS, warp), item)
        yield
        scores.done("the engine", item)
        there.full[buffer].arrive()


class Warp:
    def __init__(self, role, warp, block):
        self.values, self.me, self.warp, self.leads = role == VALUES, (role, warp), warp, warp == 0
        self.block, self.broken, self.own = block, block.broken, block.own[role]
        self.scored, self.summed = (block.q, block.dout) if self.values else (block.dout, block.q)  # for scores, sum
        self.under_way = []  # products and what they read, as they were committed
        self.item, self.results = 0, {}  # whose the registers are: item by the product's name

    def issue(self, name, item, *reads):
        self.block.issue(self.me[0], (name, item), reads)
        self.under_way.append(((name, item), reads))
        self.results[name] = item

    def wait(self, left):
        """wgmma_wait<left>: all but the last ones are done."""
        while len(self.under_way) > left:
            yield from self.block.wait(self.me[0], *self.under_way.pop(0))

    def take(self, name, item):
        """The registers hold it, and nothing is under way that writes them."""
        if self.results[name] != item or any(product[0] == name for product, _ in self.under_way):
            self.block.faults.append(f"{name} is taken by {self.me} before item {item} is there")

    def meet(self, turn, breakage):
        """Who breaks it arrives without a wait: others count the same."""
        if self.broken == breakage:
            turn.arrive()
        else:
            yield from turn.take()

    def issue_scores(self, tile, item):
        yield from self.scored.wait_full(item)
        self.issue("scores", item, (self.block.k if self.values else self.block.v, tile), (self.scored, item))

    def issue_queries(self, tile, item, wanted=True):
        """dQ over the own keys and the other block's, which lie beside K."""
        b = self.block
        if self.broken != "received is not waited for":
            yield from b.received.wait_full(item)
        # Of a tile's first step this reads what is left of the tile before, which others may write meanwhile: nobody
        # takes the result, so that is no fault. But waits count it, and it reads K.
        scores = [(part, item) for part in (*b.scores, b.received)] if wanted else []
        self.issue("dQ", item if wanted else ("unwanted", item), *scores, (b.k, tile))
        self.give_back(wanted, item, early=True)

    def give_back(self, anything, item, early=False):
        """To the other block's keys: what was received has been multiplied. early: if that is broken."""
        b = self.block
        if self.leads and anything and early == (self.broken == "received is given back before dQ"):
            if b.other.at_work == 0:
                b.faults.append("a block is written to that has ended")
            b.received.release(item)

    def add_queries(self, item):
        self.take("dQ", item)
        yield
        if self.block.orders[item % len(self.block.orders)] != item:
            self.block.faults.append(f"the order of item {item} is not there")

    def make_weights(self, first, pending):
        b, item = self.block, self.item
        self.take("scores", item)
        b.q.read(self.me, item)  # the shifts
        yield
        b.q.done(self.me, item)
        yield from self.own.take() if first else self.meet(b.scores_ready, "P is stored before the last one is read")
        if self.leads:
            b.q.release(item)
        b.weights[self.warp].write(self.me, item)
        yield from self.wait(self.broken == "P is handed over before dQ")
        b.weights_ready.arrive()
        yield
        yield from self.wait(0)
        self.give_back(pending, item - 2)

    def make_scores(self, pending):
        b, item = self.block, self.item
        yield from self.meet(b.weights_ready, "P is not waited for")
        self.take("scores", item)
        b.dout.read(self.me, item)  # the deltas
        b.weights[self.warp].read(self.me, item)
        yield
        b.weights[self.warp].done(self.me, item)
        b.dout.done(self.me, item)
        yield from self.wait(0)
        self.give_back(pending, item - 2)
        if self.broken != "the other block's buffer is not claimed":
            yield from b.other.received.claim(item)
        early = self.broken == "dS is ready before all its warps have stored"
        if early:
            b.scores_ready.arrive()
        yield
        b.scores[self.warp].write(self.me, item)
        yield
        if self.leads:
            b.received.full[item % STAGES].arrive()
        b.sent.add((self.warp, item))
        if not early:
            b.scores_ready.arrive()
        yield from self.meet(self.own, "the keys do not meet before dO is released")
        if self.leads:
            b.dout.release(item)

    def step(self, tile, n, rows):
        item, broken, values = self.item, self.broken, self.values
        first, last, pending = n == 0, n + 1 == rows, n > 1
        yield from self.make_weights(first, pending) if values else self.make_scores(pending)
        yield from self.summed.wait_full(item)
        self.issue("sum", item, (self.summed, item))
        if values and not last:
            yield from self.issue_scores(tile, item + 1)
        if pending:
            yield from self.add_queries(item - 2)
        yield from self.issue_queries(tile, item - 1, wanted=not first)
        yield
        # A wait that is broken leaves one more under way.
        more = broken == ("dO is released before dV" if values else "Q is released before dK")
        yield from self.wait((2 if values and not last else 1) + more)
        if self.leads:
            self.summed.release(item)
        if not last:
            if not values:
                yield from self.issue_scores(tile, item + 1)
            yield from self.wait((1 if values else 0) + (broken == "scores are not waited for"))
        self.item += 1

    def finish(self, tile, rows):
        yield from self.wait(0)
        self.give_back(rows > 1, self.item - 2)
        if rows > 1:
            yield from self.add_queries(self.item - 2)
        if self.values:
            yield from self.meet(self.block.scores_ready, "dS is not waited for")
        yield from self.issue_queries(tile, self.item - 1)
        yield
        yield from self.wait(self.broken == "dQ is added before it is there")
        self.give_back(True, self.item - 1)
        yield from self.add_queries(self.item - 1)

    def run(self):
        b, tile = self.block, 0
        yield from b.k.wait_full(tile)
        while (rows := b.k.said) is not None:
            b.k.read(self.me, tile)  # what is said of the tile
            if not self.values:
                yield from b.v.wait_full(tile)
            if rows > 0:
                yield from self.issue_scores(tile, self.item)
                yield from self.wait(0)
                for n in range(rows):
                    yield from self.step(tile, n, rows)
                yield from self.finish(tile, rows)
            yield  # what is said is read a last time
            b.k.done(self.me, tile)
            yield from self.meet(self.own, "a tile is released before its last warp")
            if self.leads:
                b.k.release(tile)
                b.v.release(tile)
            tile += 1
            yield from b.k.wait_full(tile)
        yield from self.meet(b.end, "a block does not wait for the other to end")
        b.at_work -= 1


def fault(seed, tiles, broken=""):
    """What goes wrong under one random schedule; empty: nothing."""
    faults, running = [], []
    handed, end = Ring(1, 1, faults), Turn(BLOCKS * len(ROLES) * WARPS)
    blocks = [Block(handed, end, broken, faults) for _ in range(BLOCKS)]
    for block, other in zip(blocks, reversed(blocks), strict=True):
        block.other = other
        running.append(produce(tiles, block, block is blocks[0]))
        running += [Warp(role, warp, block).run() for role in ROLES for warp in range(WARPS)]
        running += [send(block, warp, buffer, sum(tiles)) for warp in range(WARPS) for buffer in range(STAGES)]
    return run(random.Random(seed), running, 8000 * (sum(tiles) + len(tiles) + 1), faults)


TILES = [[4, 4], [1, 1, 1, 1], [2, 3, 1, 5], [0, 2, 0, 0, 3, 1, 0], [0, 0], [7], []]


def main():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seed {first}")
    seen = collections.Counter()
    # A breakage shows under some schedules only: another round for what no schedule of a round has shown.
    for rounds in range(1, MOST_ROUNDS + 1):
        for tiles in TILES:
            for seed in range(first + rounds * 1000, first + rounds * 1000 + EACH):
                if found := fault(seed, tiles):
                    sys.exit(f"tiles {tiles}, seed {seed}: {found}")
                for broken, hows in FAULTS.items():
                    if seen[broken] < ENOUGH:
                        seen[broken] += any(how in fault(seed, tiles, broken) for how in hows)
        if not (unseen := FAULTS.keys() - (+seen).keys()):
            break
    else:
        sys.exit(f"went unseen: {unseen}")
    print(f"{rounds * EACH * len(TILES)} schedules; seen: {dict(seen)}")


if __name__ == "__main__":
    main()
