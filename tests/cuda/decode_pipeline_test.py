"""The GPU's decoding kernel as two models under random schedules.

Inside a block of threads (src/cuda/mma/decode.h): warps with a ring of tiles each, copies that end in any order, loads
that run ahead into the next piece, before a tile is multiplied or after, queries in two buffers, results left in a free
stage of the ring; in some rows warps multiply all tiles of a step. Nothing may be read before its copy is there, nor be
overwritten while somebody reads it.

Between blocks (decode_walk.h, decode_results.h): spans of a line of items, parts in words with a run's ticket, the tree
in which parts take in others, replays of a graph with the same ticket, runs that begin early. Some blocks are resident,
the others begin when one ends. Nobody may wait for ever, an item's result must be of all its parts, each once, and of its
own run, and no word may keep the ticket.

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
    """tiles: of keys."""

    def __init__(self, number, tiles):
        self.number, self.tiles = number, tiles


class Block:
    """loads_first: before a tile is multiplied; together: every warp reads all warps' tiles of a step."""

    def __init__(self, schedule, stages, pieces, broken, faults):
        self.loads_first = schedule.choice((True, True, False))
        self.together = self.loads_first and schedule.choice((True, False))
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

    def load_next(self):
        broken, stages = self.block.broken, self.block.stages
        room = stages if broken == "no free stage" else stages - 1
        if self.loading and self.under_way < room:
            piece = self.block.pieces[self.at + self.ahead]
            self.copies.begin(self.ring[self.to], (piece.number, self.next))
            self.to = (self.to + 1) % stages
            self.under_way += 1
            self.next += WARPS
            self.loading = self.in_step(self.next) < piece.tiles
        self.copies.commit()

    def in_step(self, tile):
        """Together warps load alike, tiles beyond the last one, too."""
        return tile - self.number if self.block.together else tile

    def advance(self):
        self.ahead = True
        self.more = self.at + 1 < len(self.block.pieces)
        if not self.more:
            return
        piece = self.block.pieces[self.at + 1]
        self.copies.begin(self.block.queries[1 - self.now][self.number], piece.number)
        self.next = self.number
        self.loading = self.in_step(self.next) < piece.tiles

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
        block, queries = self.block, self.block.queries[self.now]
        rings = block.rings if block.together else [self.ring]
        if block.broken == "loads before warps meet":
            self.load_ahead()
        if block.together and block.broken != "no barrier before a step":
            yield from block.barrier.take()
        if block.loads_first and block.broken != "loads before warps meet":
            self.load_ahead()
        for part in queries:  # wide rows read them tile by tile
            part.read(self.number, piece.number)
        for w, ring in enumerate(rings):
            ring[self.stage].read(self.number, (piece.number, self.tile + w))
        yield
        for read in (*(ring[self.stage] for ring in rings), *queries):
            read.readers.discard(self.number)
        self.tile += WARPS
        self.stage = (self.stage + 1) % stages
        if not block.loads_first and block.broken != "loads before warps meet":
            self.load_ahead()

    def load_ahead(self):
        self.under_way -= 1
        self.load_next()

    def finish(self):
        left, number = list(self.block.outputs), self.piece().number
        for output in left:
            output.read(("results", self.number), ("output", number))
        yield
        for output in left:
            output.readers.discard(("results", self.number))

    def turn(self):
        self.at, self.now, self.ahead = self.at + 1, 1 - self.now, False
        self.tile, self.tiles_end = self.in_step(self.number), self.piece().tiles
        if not self.attending:
            yield from self.meet_queries()
        elif self.block.broken != "no barrier after results":
            yield from self.block.barrier.take()
        self.attending = True
        for part in self.block.queries[self.now]:  # into registers
            part.read(self.number, self.piece().number)
        yield
        for part in self.block.queries[self.now]:
            part.readers.discard(self.number)

    def run(self):
        block, owed = self.block, self.block.stages - 1
        while True:
            if not self.loading and not self.ahead:
                self.advance()
            for _ in range(owed):
                self.load_next()
            owed = 0
            while self.tile < self.tiles_end:
                yield from self.attend()
                if not self.loading and not self.ahead:
                    break
            if self.tile < self.tiles_end or not self.ahead:
                continue
            if self.attending:
                if block.together and block.broken != "no barrier before outputs":
                    yield from block.barrier.take()
                free = self.ring[(self.stage - 1) % block.stages]
                free.write(("output", self.piece().number))
                block.outputs[self.number] = free
                yield from self.meet_queries()
                yield from self.finish()
            if not self.more:
                block.ended += 1
                return
            yield from self.turn()
            owed = block.stages - 1 if self.under_way < block.stages - 1 else 0


def random_pieces(schedule):
    return [Piece(number, schedule.choice((0, 1, 2, 3, 5, 9, 14))) for number in range(schedule.randrange(1, 7))]


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
        """The slots of an item's parts, in order."""
        if self.by_unit:
            return [(item, u) for u in range(self.units[item])]
        return list(range(self.span_of(item, 0), self.span_of(item, self.units[item] - 1) + 1))


def others(parts, part, shift):
    """core::PartTree, with 3 for 7."""
    return min((parts - 1 - part) >> shift, 3) if part >> shift & 3 == 0 else 0


class Run:
    """One launch. Words are memory that all runs share: slot -> (ticket, (run, item, parts))."""

    def __init__(self, number, ticket, line, before, broken):
        self.number, self.ticket, self.line, self.before, self.broken = number, ticket, line, before, broken
        self.ended = self.let_go = 0  # blocks
        self.results = {}

    def done(self):
        return self.ended == self.line.count

    def store(self, words, slot, item, parts):
        if self.broken == "a word in halves":
            words[slot] = (self.ticket, words.get(slot, (0, None))[1])
            yield
        words[slot] = (self.ticket, (self.number, item, tuple(parts)))
        yield

    def take_in(self, words, slots, item, faults):
        """The parts that lie in some slots, once they are there."""
        taken = []
        for slot in slots:
            while words.get(slot, (0, None))[0] != self.ticket:
                yield
            word = words[slot][1]
            if word is None or word[:2] != (self.number, item):
                faults.append(f"run {self.number}, item {item} takes in {word}")
                return []
            taken += word[2]
            yield
            if self.broken != "words are left":
                words[slot] = (0, None)
        return taken

    def block(self, index, words, faults):
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
            slots = line.parts(item)
            yield
            if len(slots) == 1:
                self.results[item] = (self.number, [0])
            elif line.by_unit:
                for unit in range(begin, end):
                    yield from self.store(words, slots[unit], item, [unit])
                if begin == 0:
                    taken = yield from self.take_in(words, slots, item, faults)
                    self.results[item] = (self.number, taken)
            else:
                part = slots.index(span)
                taken, shift = [part], 0
                while (count := others(len(slots), part, shift)) > 0:
                    step = 1 << shift
                    some = slots[part + step : part + count * step + 1 : step]
                    taken += yield from self.take_in(words, some, item, faults)
                    shift += 2 if self.broken != "a level left out" else 4
                if part == 0:
                    self.results[item] = (self.number, taken)
                else:
                    yield from self.store(words, span, item, taken)
        self.ended += 1


def board(runs, resident, words, faults):
    """Blocks begin in order, as many at a time as are resident. A run's begin when the run before has let go."""
    waiting = [(r, r.block(i, words, faults)) for r in runs for i in range(r.line.count)]
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
    words = {s: (99, None) for s in range(0, 40, 3)}
    count = schedule.choice((1, 2, 3, 4, 5, 6, 7, 9, 14, 20))
    by_unit = schedule.random() < 0.4
    runs = []
    ticket = 0
    for number in range(schedule.randrange(1, 5)):
        if number == 0 or schedule.random() < 0.4:
            ticket += 1  # otherwise a replay, with lengths of its own
        units = [schedule.choice((1, 1, 2, 5, 9, 30)) for _ in range(schedule.randrange(1, 6))]
        line = Line(units, schedule.randrange(3), count, by_unit)
        runs.append(Run(number, ticket, line, runs[-1] if runs else None, broken))
    beginning = board(runs, schedule.randrange(1, count + 2), words, faults)
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
        for item in range(len(r.line.units)):
            if r.results.get(item) != (r.number, list(range(len(r.line.parts(item))))):
                return f"run {r.number}: item {item} is {r.results.get(item)}"
    left = [slot for slot, word in words.items() if word[0] == ticket]
    return f"words {left} keep their ticket" if left else ""


IN_BLOCK = (
    "no free stage",
    "queries unwaited",
    "a tile unwaited",
    "no barrier after results",
    "loads before warps meet",
    "no barrier before a step",
    "no barrier before outputs",
)
BETWEEN = (
    "rising spans",
    "a word in halves",
    "a level left out",
    "words are left",
    "nobody waits for the grid before",
)


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
