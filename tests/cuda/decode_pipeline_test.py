"""The GPU's decoding kernel as two models under random schedules.

Inside a block of threads (src/cuda/mma/decode.h): warps with a ring of tiles each, copies that end in any order, loads
that run ahead into the next piece, queries in two buffers, results left in a free stage of the ring. Nothing may be
read before its copy is there, nor be overwritten while somebody reads it.

Between blocks (decode_walk.h, decode_results.h): spans of a line of items, parts with slots, words of state with a
run's ticket, merges by the block with an item's first part, replays of a graph with the same ticket, runs that begin
early. Some blocks are resident, the others begin when one ends. Nobody may wait for ever, each merge must find the
parts of its own run, all of them, and no word may keep the ticket.

Each breakage that the tests name must be seen, or the models would prove nothing.
"""

import random
import sys

from pipeline_model import Turn, run

WARPS = 3


class Place:
    """A buffer of shared memory: what lies there, once its copy is done, and who reads it."""

    def __init__(self, name, faults):
        self.name, self.faults = name, faults
        self.content, self.there, self.readers = None, True, set()

    def begin(self, content):
        if self.readers:
            self.faults.append(f"{self.name} is overwritten while {self.readers} read it")
        if not self.there:
            self.faults.append(f"{self.name} is overwritten while a copy is on its way")
        self.content, self.there = content, False

    def write(self, content):
        self.begin(content)
        self.there = True

    def read(self, reader, content):
        if self.content != content or not self.there:
            self.faults.append(f"{reader} reads {self.name} before {content} is there")
        self.readers.add(reader)


class Copies:
    """A warp's asynchronous copies, in groups; those under way end in any order."""

    def __init__(self):
        self.groups, self.open = [], []

    def begin(self, place, content):
        place.begin(content)
        self.open.append(place)

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait(self, latest):
        """Until no group is under way but the latest ones."""
        while any(self.groups[: len(self.groups) - latest]):
            yield

    def go_on(self, schedule, over):
        while not over():
            under_way = [group for group in [*self.groups, self.open] if group]
            if under_way:
                group = schedule.choice(under_way)
                group.pop(schedule.randrange(len(group))).there = True
            yield


class Piece:
    """tiles: of keys; keeps: the merge after it takes the ring, with pieces after it; merges: there is one."""

    def __init__(self, number, tiles, merges, keeps):
        self.number, self.tiles, self.merges, self.keeps = number, tiles, merges, keeps


class Block:
    def __init__(self, schedule, stages, pieces, broken, faults):
        self.schedule, self.stages, self.pieces, self.broken = schedule, stages, pieces, broken
        self.rings = [[Place(f"stage {s} of warp {w}", faults) for s in range(stages)] for w in range(WARPS)]
        self.queries = [[Place(f"queries {i} of warp {w}", faults) for w in range(WARPS)] for i in range(2)]
        self.barrier = Turn(WARPS)
        self.outputs = [None] * WARPS  # the exchange: which stage has a warp's output
        self.ended = 0

    def over(self):
        return self.ended == WARPS


class Warp:
    """One warp of decode.h, its names. Piece -1 is none: the span has not been found."""

    def __init__(self, block, number):
        self.block, self.number = block, number
        self.ring, self.copies = block.rings[number], Copies()
        self.at, self.now = -1, 1
        self.attending = self.ahead = self.loading = False
        self.more = True
        self.tile = self.tiles_end = self.next = self.under_way = self.stage = self.to = 0

    def piece(self):
        return self.block.pieces[self.at]

    def keeps_ring(self):
        return self.attending and self.piece().keeps

    def load_next(self):
        broken, stages = self.block.broken, self.block.stages
        room = stages if broken == "no free stage" else stages - 1
        taken = self.ahead and self.keeps_ring() and broken != "loads before a merge"
        if self.loading and self.under_way < room and not taken:
            piece = self.block.pieces[self.at + self.ahead]
            self.copies.begin(self.ring[self.to], (piece.number, self.next))
            self.to = (self.to + 1) % stages
            self.under_way += 1
            self.next += WARPS
            self.loading = self.next < piece.tiles
        self.copies.commit()

    def advance(self):
        self.ahead = True
        self.more = self.at + 1 < len(self.block.pieces)
        if not self.more:
            return
        piece = self.block.pieces[self.at + 1]
        self.copies.begin(self.block.queries[1 - self.now][self.number], piece.number)
        self.next = self.number
        self.loading = self.next < piece.tiles

    def meet_queries(self):
        stages, broken = self.block.stages, self.block.broken
        if broken != "queries unwaited":
            if self.under_way == stages - 1:
                yield from self.copies.wait(stages - 2)
            else:
                self.copies.commit()
                yield from self.copies.wait(0)
        yield from self.block.barrier.take()

    def attend(self):
        stages, piece = self.block.stages, self.piece()
        yield from self.copies.wait(stages - (1 if self.block.broken == "a tile unwaited" else 2))
        place, queries = self.ring[self.stage], self.block.queries[self.now]
        for part in queries:  # wide rows read them tile by tile
            part.read(self.number, piece.number)
        place.read(self.number, (piece.number, self.tile))
        yield
        for read in (place, *queries):
            read.readers.discard(self.number)
        self.tile += WARPS
        self.under_way -= 1
        self.stage = (self.stage + 1) % stages

    def merge(self):
        block, piece = self.block, self.piece()
        left = list(block.outputs)
        for output in left:  # merge_warps
            output.read(("merge", self.number), ("output", piece.number))
        yield
        for output in left:
            output.readers.discard(("merge", self.number))
        if block.broken != "no barrier after the merge":
            yield from block.barrier.take()
        if piece.merges:  # merge_parts: every warp has weights and parts anywhere in the ring
            places = [place for ring in block.rings for place in ring]
            for place in places:
                place.readers.add(("parts", self.number))
                place.content, place.there = ("parts", piece.number), True
            yield
            for place in places:
                place.readers.discard(("parts", self.number))
            yield from block.barrier.take()

    def turn(self):
        self.at, self.now, self.ahead, self.attending = self.at + 1, 1 - self.now, False, True
        self.tile, self.tiles_end = self.number, self.piece().tiles
        for part in self.block.queries[self.now]:  # into registers
            part.read(self.number, self.piece().number)
        yield
        for part in self.block.queries[self.now]:
            part.readers.discard(self.number)

    def run(self):
        block, owed = self.block, self.block.stages - 1
        while True:
            if not self.loading and not self.ahead and (self.tile >= self.tiles_end or not self.keeps_ring()):
                self.advance()
            for _ in range(owed):
                self.load_next()
            owed = 0
            while self.tile < self.tiles_end:
                yield from self.attend()
                self.load_next()
                if not self.loading and not self.ahead:
                    break
            if self.tile < self.tiles_end or not self.ahead:
                continue
            if self.attending:
                free = self.ring[(self.stage - 1) % block.stages]
                free.write(("output", self.piece().number))
                block.outputs[self.number] = free
            yield from self.meet_queries()
            if self.attending:
                yield from self.merge()
            if not self.more:
                block.ended += 1
                return
            yield from self.turn()
            owed = block.stages - 1 if self.under_way < block.stages - 1 else 0


def random_pieces(schedule):
    """Pieces of a block. Only the last of a span, or one that keeps the ring, may end with a merge of parts."""
    count = schedule.randrange(1, 7)
    pieces = []
    for number in range(count):
        last = number == count - 1
        merges = schedule.random() < 0.4
        keeps = merges and not last
        pieces.append(Piece(number, schedule.choice((0, 1, 2, 3, 5, 9, 14)), merges, keeps))
    return pieces


def fault_in_block(seed, broken=""):
    """What goes wrong in a block under one random schedule; empty: nothing."""
    schedule, faults = random.Random(seed), []
    block = Block(schedule, schedule.choice((3, 4)), random_pieces(schedule), broken, faults)
    warps = [Warp(block, w) for w in range(WARPS)]
    running = [warp.run() for warp in warps] + [warp.copies.go_on(schedule, block.over) for warp in warps]
    return run(schedule, running, 40_000, faults)


class Line:
    """core::Spans: items of so many units and a fixed part, cut in equal spans."""

    def __init__(self, units, fixed, count, by_unit):
        self.units, self.fixed, self.count, self.by_unit = units, fixed, count, by_unit
        self.starts, total = [], 0
        for n in units:
            self.starts.append(total)
            total += fixed + n
        self.length = max(-(-total // count), 1)

    def units_of(self, item, span):
        begin = span * self.length - self.starts[item] - self.fixed
        return [min(max(x, 0), self.units[item]) for x in (begin, begin + self.length)]

    def span_of(self, item, unit):
        return (self.starts[item] + self.fixed + unit) // self.length

    def parts(self, item):
        """[(slot, first unit, end)] of an item, in order."""
        if self.by_unit:
            return [((item, u), u, u + 1) for u in range(self.units[item])]
        first, last = (self.span_of(item, u) for u in (0, self.units[item] - 1))
        spans = range(first, last + 1)
        return [(self.count + s if s == first else s, *self.units_of(item, s)) for s in spans]


class Run:
    """One launch. Words and outputs of parts are memory that all runs share: (ticket, run) and run."""

    def __init__(self, number, ticket, line, before, broken):
        self.number, self.ticket, self.line, self.before, self.broken = number, ticket, line, before, broken
        self.ended = self.let_go = 0  # blocks
        self.results = {}

    def done(self):
        return self.ended == self.line.count

    def block(self, index, words, outputs, faults):
        """A block, from when it is resident."""
        line = self.line
        if self.broken != "nobody waits for the grid before":
            while self.before is not None and not self.before.done():
                yield
        self.let_go += 1
        span = index if self.broken == "rising spans" else line.count - 1 - index
        for item in range(len(line.units)):
            begin, end = line.units_of(item, span)
            if begin == end:
                continue
            parts = line.parts(item)
            yield
            if len(parts) == 1:
                self.results[item] = self.number
                continue
            for slot, first, _ in parts:
                if begin <= first < end:
                    if self.broken == "told too early":
                        words[slot] = (self.ticket, self.number)
                        yield
                    outputs[slot] = (self.number, item)
                    yield
                    words[slot] = (self.ticket, self.number)
            if begin > 0:
                continue
            for slot, first, _ in parts:
                while words.get(slot, (0, 0))[0] != self.ticket:
                    yield
                if outputs.get(slot) != (self.number, item):
                    faults.append(f"run {self.number} merges {outputs.get(slot)} as unit {first} of item {item}")
            yield
            if self.broken != "words are left":
                for slot, _, _ in parts:
                    words[slot] = (0, 0)
            self.results[item] = self.number
        self.ended += 1


def board(runs, resident, words, outputs, faults):
    """Blocks begin in order, as many at a time as are resident. A run's begin when the run before has let go."""
    waiting = [(r, r.block(i, words, outputs, faults)) for r in runs for i in range(r.line.count)]
    here = []
    while waiting or here:
        if waiting and len(here) < resident:
            r = waiting[0][0]
            if r.before is None or r.before.done() or r.before.let_go == r.before.line.count:
                here.append(waiting.pop(0)[1])
        yield here


def fault_between_blocks(seed, broken=""):
    """What goes wrong in some runs, one after another; empty: nothing."""
    schedule, faults = random.Random(seed), []
    # What others have left there: any words, but no ticket of these runs.
    words, outputs = {s: (99, -1) for s in range(0, 40, 3)}, {}
    count = schedule.randrange(1, 8)
    by_unit = schedule.random() < 0.4
    runs = []
    ticket = 0
    for number in range(schedule.randrange(1, 5)):
        if number == 0 or schedule.random() < 0.4:
            ticket += 1  # otherwise a replay, with lengths of its own
        units = [schedule.choice((1, 1, 2, 5, 9)) for _ in range(schedule.randrange(1, 6))]
        line = Line(units, schedule.randrange(3), count, by_unit)
        runs.append(Run(number, ticket, line, runs[-1] if runs else None, broken))
    beginning = board(runs, schedule.randrange(1, count + 2), words, outputs, faults)
    for _ in range(20_000):
        here = next(beginning, None)
        if here is None:
            break
        if here:
            at = schedule.randrange(len(here))
            if next(here[at], "over") == "over":
                del here[at]
        if faults:
            return faults[0]
    else:
        return "blocks wait for ever"
    for r in runs:
        if any(r.results.get(item) != r.number for item in range(len(r.line.units))):
            return f"run {r.number} has no result of some item"
    left = [slot for slot, word in words.items() if word[0] == ticket]
    return f"words {left} keep their ticket" if left else ""


IN_BLOCK = (
    "no free stage",
    "loads before a merge",
    "queries unwaited",
    "a tile unwaited",
    "no barrier after the merge",
)
BETWEEN = ("rising spans", "told too early", "words are left", "nobody waits for the grid before")


def main():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seed {first}")
    for name, model, breakages in (("a block", fault_in_block, IN_BLOCK), ("blocks", fault_between_blocks, BETWEEN)):
        schedules = range(first, first + 1500)
        for seed in schedules:
            if found := model(seed):
                sys.exit(f"{name}, seed {seed}: {found}")
        seen = {broken: sum(model(seed, broken) != "" for seed in schedules[:300]) for broken in breakages}
        if not all(seen.values()):
            sys.exit(f"{name}: breakages went unseen: {seen}")
        print(f"{name}: {len(schedules)} schedules; of 300 each breakage is seen in {seen}")


if __name__ == "__main__":
    main()
