"""The Hopper backward kernel's pipeline as a model, like the forward's (forward_pipeline_test.py).

Blocks of one producer (src/cuda/sm90/backward_producer.h), two warpgroups of two warps (backward.h), a thread for
each of these that has its pieces of dQ added to memory (PieceAdder), and a warp that makes dQ from its sums
(PieceFinisher). One buffer each of K and V, three of Q, two of dO; two of dS, which both warpgroups write and both
read; one for a warpgroup's piece; eight slots, which the producer fills before an item's Q, say where its pieces
go; two for what comes back of a row, in four parts. A step begins with its S and dP; in turns with the other
warpgroup it issues dV and dQ of the step before, hands the latter over, and issues dK, S and dP of the next one. A
tile's last step has none of these; it gives V back at once, and issues its own dQ after its turn. K is asked for after
all else that a tile's first step needs, and given back before the last piece is handed over. From the second
warpgroup a mask may hide a tile's first rows: it lets them pass by. Tiles are handed out as blocks
get free; where sums are ordered, a piece waits for those of the key blocks that add before it, the first of which
stores. What has been added is counted: at once, or, without an order, when the next piece has been handed over. A
row is finished when all its pieces have been counted; every block takes its share of rows, and of what is left in
the end its warpgroups take, too. There are tiles that no row sees, rows that see no tile, blocks that begin when
another one has ended, and the end of work.

A product reads from when all warps of its warpgroup have issued it until one has waited for it; shifts, deltas
and what is said of a tile are read by each warp. One warp releases for its warpgroup. No schedule may end with
everybody waiting, nothing may be filled or written while somebody reads it, or read before it is there, every
piece is added once, in its order if there is one, and every row is finished once, when all its pieces have been
added. What each of FAULTS breaks must be seen, or the model would prove nothing. What is multiplied in vain, dQ
before a tile's first step, is left out.

(dO released too early alone would go unseen: the producer fills it after Q, which is kept.)
"""

import collections
import random
import sys

from pipeline_model import WARPS, Exchange, Mbarrier, Products, Ring, Turn, run

GROUPS = 2
SLOTS = 8
RETURNED, PARTS = 2, 4  # buffers for what comes back of a row, and in how many parts that does
RUNS = 8  # of each list of tiles
ENOUGH = 3  # times that a breakage is seen
MOST_ROUNDS = 12
FAULTS = {  # what is broken, as the model may see it
    "dS is not claimed": ("dS",),
    "dS is not waited for": ("dS",),
    "dS is released before dQ": ("dS",),
    "K is released before dQ": ("overwritten",),
    "Q is released before dK": ("overwritten",),
    "Q and dO are released before dV": ("overwritten",),
    "a tile is released before its last warp": ("overwritten",),
    "V comes after all rows": ("wait for ever",),
    "a tile without rows is not released": ("wait for ever",),
    "V is released before the last dP": ("overwritten",),
    "who passes by takes no turn": ("wait for ever",),
    "a piece is not claimed": ("a piece is written while", "a piece is not whole"),
    "a piece is released before its copy has read": ("a piece is written while",),
    "two slots for pieces": ("a piece goes elsewhere",),
    "four slots for pieces": ("a piece goes elsewhere",),
    "the end is not claimed": ("a piece", "wait for ever"),
    "the first tile is its block's": ("wait for ever",),
    "a sum is counted before it is there": ("finished before",),
    "the last sum is not counted": ("wait for ever",),
    "nobody waits for the count": ("finished before",),
    "the first consumer's count is all": ("finished before",),
    "two take the same share": ("finished twice",),
    "a share is forgotten": ("never finished",),
    "a share is taken before all know the last": ("finished twice", "never finished"),
    "a share is not waited for": ("finished twice", "never finished"),
    "a part is fetched before the last is read": ("a part",),
    "a part is not waited for": ("a part",),
}
ORDERED_FAULTS = {
    "early keys begin": ("wait for ever",),
    "nobody waits for a turn": ("out of order",),
    "a turn is passed before its sum is there": ("out of order",),
    "a turn is not passed": ("wait for ever",),
    "the second stores, too": ("out of order", "finished before"),
}


class Device:
    """What the blocks share: tiles = [[(row, rank)]], who is next, turns, sums of dQ and dQ."""

    def __init__(self, tiles, blocks, ordered, broken):
        self.tiles, self.blocks, self.ordered, self.broken = tiles, blocks, ordered, broken
        self.next_tile = blocks if broken == "the first tile is its block's" else 0
        self.ended = 0  # blocks
        self.turns = collections.Counter()
        self.adding, self.added = collections.Counter(), collections.Counter()
        self.adders = collections.Counter(row for tile in tiles for row, _ in tile)
        self.rows = sorted(self.adders, key=str) + ["unseen", "unseen, too"]
        self.finished = collections.Counter()  # by row and warp of those who share it
        self.faults = []

    def next(self):
        self.next_tile += 1
        return self.next_tile - 1

    def counted(self, row):
        """Whether all pieces of a row have been."""
        if self.broken == "nobody waits for the count":
            return True
        groups = 1 if self.broken == "the first consumer's count is all" else GROUPS
        return all(self.turns[row, group] == self.adders[row] for group in range(groups))

    def finish(self, row, warps):
        """Parts of a row's sums become dQ."""
        if any(self.added[row, group] != self.adders[row] for group in range(GROUPS)):
            self.faults.append(f"row {row} is finished before its sums are there")
        for warp in warps:
            self.finished[row, warp] += 1
            if self.finished[row, warp] > 1:
                self.faults.append(f"row {row} is finished twice")

    def missing(self):
        wanted = collections.Counter((row, group) for tile in self.tiles for row, _ in tile for group in range(GROUPS))
        if wanted != self.added:
            return "dQ is not the sum of its pieces"
        if len(self.finished) != len(self.rows) * WARPS:
            return "a row is never finished"
        return ""


class Block(Products):
    """Shared memory of a block, and its copy engine's queues."""

    def __init__(self, device, index):
        super().__init__(start=WARPS)
        self.device, self.faults, self.index = device, device.faults, index
        self.k, self.v = Ring(1, GROUPS, self.faults), Ring(1, GROUPS, self.faults)
        self.q, self.dout = Ring(3, GROUPS, self.faults), Ring(2, GROUPS, self.faults)
        everyone = [(group, warp) for group in range(GROUPS) for warp in range(WARPS)]
        self.scores = Exchange("dS", 2, everyone, GROUPS, self.faults)
        self.sums = [Exchange("a piece", 1, [x for x in everyone if x[0] == g], 1, self.faults)
                     for g in range(GROUPS)]
        self.slots = [None] * SLOTS
        self.turns = [Turn(GROUPS * WARPS) for _ in range(GROUPS)]
        self.group = [Turn(WARPS) for _ in range(GROUPS)]
        self.pieces = [collections.deque() for _ in range(GROUPS)]  # to be read and added
        self.pieces_read, self.pieces_added = [0] * GROUPS, [0] * GROUPS
        self.shares = 0  # that have been taken
        self.taken = [None] * GROUPS  # the last one of a warpgroup
        self.parts = collections.deque()  # to be fetched
        self.returned = [None] * RETURNED
        self.returned_full = [Mbarrier(1) for _ in range(RETURNED)]
        self.running = 2 + GROUPS * (1 + WARPS)  # all but the copy engine

    def slot(self, item):
        return item % {"two slots for pieces": 2, "four slots for pieces": 4}.get(self.device.broken, SLOTS)


def produce(block):
    device, tile, item = block.device, 0, 0
    index = block.index if device.broken == "the first tile is its block's" else device.next()
    while index < len(device.tiles):
        rows = device.tiles[index]
        if not rows:
            yield from block.k.fill(tile, rows)
            yield from block.v.fill(tile)
        for n, row in enumerate(rows):
            yield from block.q.claim(item)
            block.slots[block.slot(item)] = row
            yield from block.q.fill(item)
            if n == 0 and device.broken != "V comes after all rows":
                yield from block.v.fill(tile)
            yield from block.dout.fill(item)
            if n == 0:
                yield from block.k.fill(tile, rows)
            item += 1
        if rows and device.broken == "V comes after all rows":
            yield from block.v.fill(tile)
        tile += 1
        index = device.next()
    yield from block.k.claim(tile)
    block.slots[block.slot(item)] = None
    yield from block.k.fill(tile, None)  # there are no more


def copy_pieces(group, block):
    """The copy engine, as it adds the pieces of a warpgroup."""
    device = block.device
    while block.running:
        if not block.pieces[group]:
            yield
            continue
        row, rank, item = block.pieces[group].popleft()
        place = (row, group)
        if device.ordered and (device.added[place] != rank or device.adding[place]):
            device.faults.append(f"row {row}: a sum of rank {rank} is added out of order")
        device.adding[place] += 1
        if block.sums[group].read("adder", item) != row:
            device.faults.append(f"a piece goes elsewhere: to row {row}")
        yield
        block.sums[group].done("adder", item)
        block.pieces_read[group] += 1
        yield
        device.adding[place] -= 1
        stores = device.ordered and rank <= (device.broken == "the second stores, too")
        device.added[place] = 1 if stores else device.added[place] + 1
        block.pieces_added[group] += 1


def add_pieces(group, block):
    """PieceAdder: has the pieces of a warpgroup added to memory."""
    device, sums, broken = block.device, block.sums[group], block.device.broken
    before, item = None, 0
    while True:
        yield from sums.wait_full(item)
        order = block.slots[block.slot(item)]
        if order is None:
            break
        row, rank = order
        turn = (row, group)
        if device.ordered and broken != "nobody waits for a turn":
            while device.turns[turn] != rank:
                yield
        block.pieces[group].append((row, rank, item))
        if broken == "a turn is passed before its sum is there" or broken == "a sum is counted before it is there":
            device.turns[turn] += 1
        if broken != "a piece is released before its copy has read":
            while block.pieces_read[group] <= item:
                yield
        sums.release(item)
        item += 1
        if not device.ordered:
            while block.pieces_added[group] < item - 1:
                yield
            if before is not None and broken != "a sum is counted before it is there":
                device.turns[before] += 1
            before = turn
        else:
            while block.pieces_added[group] < item:
                yield
            if "a turn is" not in broken:
                device.turns[turn] += 1
    while block.pieces_added[group] < item:
        yield
    if before is not None and broken not in ("the last sum is not counted", "a sum is counted before it is there"):
        device.turns[before] += 1


class Finisher:
    """PieceFinisher: sums become dQ, each block's share of rows."""

    def __init__(self, block):
        self.block, self.device, self.broken = block, block.device, block.device.broken

    def take(self):
        taken = self.block.shares
        if self.broken == "two take the same share":
            yield
            self.block.shares = taken + 1
        else:
            self.block.shares += 2 if self.broken == "a share is forgotten" and taken == 0 else 1
        return taken

    def row_of(self, taken):
        """None: there are no more."""
        index = self.block.index + taken * self.device.blocks
        return self.device.rows[index] if index < len(self.device.rows) else None

    def wait(self, row):
        while not self.device.counted(row):
            yield

    def run(self):
        """A warp, beside the products."""
        while (row := self.row_of((yield from self.take()))) is not None:
            yield from self.wait(row)
            yield from self.write(row)

    def write(self, row):
        b, early = self.block, self.broken == "a part is fetched before the last is read"
        b.parts += [(row, i) for i in range(RETURNED)]
        for i in range(PARTS):
            if self.broken != "a part is not waited for":
                while not b.returned_full[i % RETURNED].done(i // RETURNED % 2):
                    yield
            if early and i < RETURNED:
                b.parts.append((row, i + RETURNED))
                yield
            if b.returned[i % RETURNED] != (row, i):
                b.faults.append(f"a part of row {row} is not there")
            yield
            if b.returned[i % RETURNED] != (row, i):
                b.faults.append(f"a part of row {row} is overwritten")
            if not early and i < RETURNED:
                b.parts.append((row, i + RETURNED))
        self.device.finish(row, range(WARPS))

    def copy(self):
        """The copy engine, as it fetches parts."""
        b = self.block
        while b.running:
            if b.parts:
                row, i = b.parts.popleft()
                yield
                b.returned[i % RETURNED] = (row, i)
                b.returned_full[i % RETURNED].arrive()
            yield

    def help(self, group, warp):
        """A warp of those that consumed."""
        b = self.block
        while True:
            if self.broken != "a share is taken before all know the last":
                yield from b.group[group].take()
            if warp == 0:
                b.taken[group] = yield from self.take()
            if self.broken != "a share is not waited for":
                yield from b.group[group].take()
            taken = b.taken[group]
            row = None if taken is None else self.row_of(taken)
            if row is None:
                break
            yield from self.wait(row)
            yield
            self.device.finish(row, [warp])


def run_in(block, together, steps):
    """Only so many blocks run together; the copy engine of one stops when nobody is left to ask for anything."""
    while block.device.ended <= block.index - together:
        yield
    yield from steps
    block.running -= 1
    block.device.ended += block.running == 0


def hidden(rows):
    """Whether the second warpgroup's keys see none of a tile's first rows: of half of those with more."""
    return len(rows) > 1 and sum(map(ord, str(rows[0]))) % 2 == 0


class Consumer:
    """A warp."""

    def __init__(self, group, warp, block):
        self.group, self.me, self.leads = group, (group, warp), warp == 0
        self.block, self.broken = block, block.device.broken
        self.item = 0

    def hand_over(self, item, row):
        """add_queries()"""
        sums = self.block.sums[self.group]
        if self.broken != "a piece is not claimed":
            yield from sums.claim(item)
        sums.write(self.me, item, row)
        yield
        sums.full[0].arrive()

    def products(self, tile, item):
        b = self.block
        return {"S": [(b.k, tile), (b.q, item)], "dP": [(b.v, tile), (b.dout, item)], "dV": [(b.dout, item)],
                "dK": [(b.q, item)], "dQ": [(b.scores, item), (b.k, tile)]}

    def issue(self, name, tile, item):
        self.block.issue(self.group, (name, item), self.products(tile, item)[name])

    def wait(self, name, tile, item):
        yield from self.block.wait(self.group, (name, item), self.products(tile, item)[name])

    def begin(self, tile):
        """S and dP of a tile's first step."""
        b, item = self.block, self.item
        yield from b.q.wait_full(item)
        self.issue("S", tile, item)
        yield from b.dout.wait_full(item)
        self.issue("dP", tile, item)
        yield
        yield from self.wait("S", tile, item)
        yield from self.wait("dP", tile, item)

    def store_scores(self):
        b, item = self.block, self.item
        if self.broken != "dS is not claimed":
            yield from b.scores.claim(item)
        b.scores.write(self.me, item)
        b.scores.full[item % 2].arrive()

    def pass_by(self):
        b, item = self.block, self.item
        yield from b.q.wait_full(item)
        yield from b.dout.wait_full(item)
        yield from self.store_scores()
        if self.broken != "who passes by takes no turn":
            yield from b.turns[self.group].take()
            b.turns[self.group ^ 1].arrive()
        if self.leads:
            b.dout.release(item)
            b.q.release(item)
        self.item += 1

    def step(self, tile, rows, n):
        b, item, broken = self.block, self.item, self.broken
        last = n + 1 == len(rows)
        if last and self.leads and broken != "V is released before the last dP":
            b.v.release(tile)
        b.q.read(self.me, item)  # the shifts
        b.dout.read(self.me, item)  # the deltas
        yield
        b.q.done(self.me, item)
        b.dout.done(self.me, item)
        yield from self.store_scores()
        yield from b.turns[self.group].take()
        self.issue("dV", tile, item)
        if self.leads and broken == "Q and dO are released before dV":
            b.q.release(item)
            b.dout.release(item)
        if n > 0:
            if broken != "dS is not waited for":
                yield from b.scores.wait_full(item - 1)
            self.issue("dQ", tile, item - 1)
            if self.leads and broken == "dS is released before dQ":
                b.scores.release(item - 1)
        yield
        yield from self.wait("dV", tile, item)
        if self.leads and broken != "Q and dO are released before dV":
            b.dout.release(item)
        if n > 0:
            yield from self.wait("dQ", tile, item - 1)
            if self.leads and broken != "dS is released before dQ":
                b.scores.release(item - 1)
            yield from self.hand_over(item - 1, rows[n - 1][0])
        self.issue("dK", tile, item)
        if self.leads and broken == "Q is released before dK":
            b.q.release(item)
        if last:
            b.turns[self.group ^ 1].arrive()
            if broken != "dS is not waited for":
                yield from b.scores.wait_full(item)
            if self.leads and broken == "K is released before dQ":
                b.k.release(tile)
            self.issue("dQ", tile, item)
            if self.leads and broken == "dS is released before dQ":
                b.scores.release(item)
        else:
            if self.leads and broken == "V is released before the last dP" and n + 2 == len(rows):
                b.v.release(tile)
            yield from b.q.wait_full(item + 1)
            self.issue("S", tile, item + 1)
            yield from b.dout.wait_full(item + 1)
            self.issue("dP", tile, item + 1)
        yield
        yield from self.wait("dK", tile, item)
        if self.leads and "Q " not in broken:
            b.q.release(item)
        if last:
            yield from self.wait("dQ", tile, item)
            if self.leads and broken != "dS is released before dQ":
                b.scores.release(item)
        else:
            b.turns[self.group ^ 1].arrive()
            yield
            yield from self.wait("S", tile, item + 1)
            yield from self.wait("dP", tile, item + 1)
        self.item += 1

    def run(self):
        b, tile = self.block, 0
        if self.group == 1:
            b.turns[0].arrive()
        while True:
            yield from b.k.wait_full(tile)
            rows = b.k.said
            if rows is None:
                break
            b.k.read(self.me, tile)  # what is said of the tile
            yield from b.v.wait_full(tile)
            if rows:
                passes = self.group == 1 and hidden(rows)
                if passes:
                    yield from self.pass_by()
                yield from self.begin(tile)
                for n in range(passes, len(rows)):
                    yield from self.step(tile, rows, n)
            if self.broken != "a tile is released before its last warp":
                b.k.done(self.me, tile)
                yield from b.group[self.group].take()
            if self.leads and (rows or self.broken != "a tile without rows is not released"):
                if not rows or self.broken != "K is released before dQ":
                    b.k.release(tile)
                if not rows or (self.broken == "V is released before the last dP" and len(rows) == 1):
                    b.v.release(tile)
            if rows:
                yield from self.hand_over(self.item - 1, rows[-1][0])
            yield  # writes dK and dV
            b.k.done(self.me, tile)
            tile += 1
        if self.broken != "the end is not claimed":
            yield from b.sums[self.group].claim(self.item)
        yield
        b.sums[self.group].full[0].arrive()
        yield from Finisher(b).help(*self.me)


def fault(seed, tiles, blocks, ordered, broken=""):
    """What goes wrong under one random schedule; empty: nothing."""
    schedule = random.Random(seed)
    device = Device(tiles, blocks, ordered, broken)
    running, together = [], schedule.choice((1, blocks, blocks))
    for index in range(blocks):
        block = Block(device, index)
        working = [produce(block), Finisher(block).run()]
        for group in range(GROUPS):
            working.append(add_pieces(group, block))
            working += [Consumer(group, warp, block).run() for warp in range(WARPS)]
        running += [run_in(block, together, steps) for steps in working]
        running += [copy_pieces(group, block) for group in range(GROUPS)] + [Finisher(block).copy()]
    steps = 5000 * blocks * (sum(map(len, tiles)) + len(tiles) + 1)
    return run(schedule, running, steps, device.faults) or device.missing()


def any_order(*lengths):
    """Tiles of so many rows, each row another one."""
    rows = iter(range(sum(lengths)))
    return [[(next(rows), 0) for _ in range(length)] for length in lengths]


def in_order(blocks, sees, heads=1, early=0):
    """Tiles of a head after another, its last block of keys first, rows in their order; of the last `early` heads,
    which take turns, the first block of keys first, rows from the last on. sees(keys, row) of `blocks` each."""
    def tile(head, keys, before, rows):
        return [((head, m), sum(sees(other, m) for other in before)) for m in rows if sees(keys, m)]
    late = heads - early
    tiles = [tile(head, keys, range(keys + 1, blocks), range(blocks))
             for head in range(late) for keys in reversed(range(blocks))]
    return tiles + [tile(head, keys, range(keys), reversed(range(blocks)))
                    for keys in range(blocks) for head in range(late, heads)]


ANY = [any_order(*lengths) for lengths in ([0, 2, 0, 0, 0, 3, 1, 0], [4] * 4, [1] * 6, [2, 3, 1, 5, 2], [0, 0, 0],
                                           [7], [])]
ANY += [in_order(4, lambda keys, row: True), in_order(4, lambda keys, row: keys <= row)[::-1]]
ORDERED = [in_order(4, lambda keys, row: True), in_order(5, lambda keys, row: keys <= row),
           in_order(6, lambda keys, row: row - 2 <= keys <= row), in_order(3, lambda keys, row: keys <= row, heads=2),
           in_order(4, lambda keys, row: keys == row), in_order(4, lambda keys, row: keys <= row, heads=3, early=2),
           in_order(5, lambda keys, row: keys <= row, early=1)]


def check(tiles, ordered, first, runs, faults, seen):
    """Random schedules: none may go wrong, but those of what is broken, which are counted."""
    for seed in range(first, first + runs):
        blocks = 1 + seed % 3
        if found := fault(seed, tiles, blocks, ordered):
            sys.exit(f"tiles {tiles}, {blocks} blocks, seed {seed}: {found}")
        if seed >= first + 20:
            continue
        for broken, hows in faults.items():
            if seen[broken] >= ENOUGH:
                continue
            order = tiles[::-1] if broken == "early keys begin" else tiles
            found = fault(seed, order, blocks, ordered, broken)
            seen[broken] += any(how in found for how in hows)


def main():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seed {first}")
    seen = collections.Counter()
    # A breakage shows under some schedules only: another round for what no schedule of a round has shown.
    for rounds in range(1, MOST_ROUNDS + 1):
        for tiles in ANY:
            check(tiles, False, first + rounds * 1000, RUNS, FAULTS, seen)
        for tiles in ORDERED:
            check(tiles, True, first + rounds * 1000, RUNS, ORDERED_FAULTS, seen)
        if not (unseen := (FAULTS | ORDERED_FAULTS).keys() - (+seen).keys()):
            break
    else:
        sys.exit(f"went unseen: {unseen}")
    print(f"{rounds * RUNS * (len(ANY) + len(ORDERED))} schedules; seen: {dict(seen)}")


if __name__ == "__main__":
    main()
