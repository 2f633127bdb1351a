"""The Hopper forward kernel's pipeline as a model: its barriers, in its order, under random schedules.

One producer (src/cuda/sm90/forward_producer.h), two or three warpgroups (forward_consumer.h), rings of two for keys and values;
the queries of a tile are one item of their ring, or one for each warpgroup. A tile's description travels with them,
tiles without keys and the end of work too. In some tiles a warpgroup passes over the first block, in some it wants the first
block's values at once, to clear some. No schedule may end with everybody waiting, and no buffer may be filled while
somebody still multiplies what lies in it, or read before it is there. Where keys lie in pages (forward_pages.h) some
warps fetch keys and as many others values, each its part of every block; the first one of the keys hands out tiles.
Two blocks of a cluster, each with all of that, exchange scores warpgroup by warpgroup, block by block.
Of 8 bits one warp schedules: it tells another one what to load, and describes each share once its buffer is free.
Dropping the waits of skip_keys() and skip_values() must be seen, and so must values that come late and a warp without a
part that goes along, scores that are sent before the last ones have been read, and loads with too little room, or the
model would prove nothing.
"""

import functools
import random
import sys

from pipeline_model import Ring, Sums, Turn, run

STAGES = 2
AHEAD = 4


def produce(tiles, shares, q, k, v, late):
    """The producer; late: it leaves the values of a tile for the next one with keys."""
    item = values = handed = 0
    for blocks in tiles:
        if blocks == 0:
            if values < item and not late:
                yield from v.fill(values)
                values += 1
            for _ in range(shares):
                yield from q.fill(handed)
                handed += 1
        for n in range(blocks):
            yield from k.fill(item)
            for share in range(shares if n == 0 else 1):
                if n == 0:
                    yield from q.fill(handed)
                    handed += 1
                if share == 0 and values < item:
                    yield from v.fill(values)
                    values += 1
            item += 1
            yield
    if values < item:
        yield from v.fill(values)
    for share in range(shares):
        yield from q.fill(handed + share)  # says that there are no more


def schedule_tiles(tiles, shares, q, loads):
    """The warp that finds tiles (ForwardScheduler). What it says of a share is a part of the buffer of its queries."""
    handed = 0
    for n in range(len(tiles) + 1):  # the last one: there are no more
        yield
        loads.land(n)
        for _ in range(shares):
            yield from q.claim(handed)
            yield
            q.land(handed)
            handed += 1
            yield


def load_scheduled(tiles, shares, q, k, v, loads):
    """The warp that loads what has been scheduled."""
    item = values = handed = 0
    for n, blocks in enumerate([*tiles, 0]):
        if values < item:
            yield from v.fill(values)
            values += 1
        yield from loads.wait_full(n)
        loads.read("loader", n)
        yield
        loads.done("loader", n)
        for block in range(max(blocks, 1)):
            if blocks > 0:
                yield from k.fill(item)
            for share in range(shares if block == 0 else 1):
                if block == 0:
                    yield from q.fill(handed)
                    handed += 1
                if share == 0 and values < item:
                    yield from v.fill(values)
                    values += 1
            item += blocks > 0
            yield


def fetch_pages(tiles, ring, part=True):
    """A warp that fetches its part of keys, or of values; without a part it goes along."""
    for item in range(sum(tiles)):
        yield from ring.claim(item)
        yield  # copies are on their way
        if part:
            ring.land(item)
        yield


def hand_out_pages(tiles, shares, q, k):
    """The first warp of the keys."""
    item = handed = 0
    for blocks in [*tiles, 0]:  # the last one: there are no more
        for n in range(max(blocks, 1)):
            if blocks > 0:
                yield from k.claim(item)
                yield
                k.land(item)
                item += 1
            for _ in range(shares if n == 0 else 0):
                yield from q.fill(handed)
                handed += 1
            yield


def consume(group, tiles, shares, skips, turns, q, k, v, waits, clears, turn_late, exchange=None,
            writes_first=False):
    """One warpgroup; skips(tile, group, last group): does it pass over the tile's first block?
    exchange(): of the block's scores with the other block's, if there is one; turn_late: the next one may issue when O
    is there, not when it has been issued (kEndsLate); writes_first: a tile's last O is multiplied out of turn, before
    the next tile is asked for (kWritesFirst)."""
    if group == len(turns) - 1:
        turns[0].arrive()
    item = weighed = -1
    mine, multiplies = 0 if shares == 1 else group, False
    spares = shares == 1 and q.stages > 1  # then queries are released after the last step
    for tile, blocks in enumerate(tiles):
        asked = tile * shares + mine
        if writes_first and weighed >= 0 and not multiplies:
            yield from v.wait_full(weighed)
            v.read(group, weighed)
            multiplies = True
        yield from q.wait_full(asked)
        q.read(group, asked)
        yield
        if multiplies and blocks > 0:
            v.done(group, weighed)
            v.release(weighed)
            weighed, multiplies = -1, False
        if blocks == 0:
            q.done(group, asked)
            q.release(asked)
            continue
        skipped = skips(tile, group, len(turns) - 1)
        for n in range(blocks):
            item += 1
            if waits or n >= skipped:
                yield from k.wait_full(item)
            if n < skipped:  # skip_keys
                yield from turns[group].take()
                k.release(item)
                if not waits:
                    v.release(item)
                turns[(group + 1) % len(turns)].arrive()
                continue
            yield from turns[group].take()
            k.read(group, item)
            yield
            if weighed >= 0:
                yield from v.wait_full(weighed)
                v.read(group, weighed)
            passes_late = turn_late and weighed >= 0
            if not passes_late:
                turns[(group + 1) % len(turns)].arrive()
            yield
            k.done(group, item)
            k.release(item)
            if n == blocks - 1 and not spares:
                q.done(group, asked)
                q.release(asked)
            yield
            if exchange is not None:
                yield from exchange()
            if passes_late:
                turns[(group + 1) % len(turns)].arrive()
                yield
            if weighed >= 0:
                v.done(group, weighed)
                v.release(weighed)
            weighed = item
            if clears and n == skipped:
                yield from v.wait_full(weighed)
            if waits and n == skipped:  # skip_values
                for i in range(item - skipped, item):
                    yield from v.wait_full(i)
                    v.release(i)
        if spares:
            q.done(group, asked)
            q.release(asked)
    if writes_first and weighed >= 0:
        yield from v.wait_full(weighed)
    yield from q.wait_full(len(tiles) * shares + mine)
    if weighed >= 0:
        yield from v.wait_full(weighed)


def fault(seed, groups, q_stages, shares, tiles, skips, waits=True, clears=False, late=False,
          turn_late=False, writes_first=False, warps=0, idle=0, rooms=0):
    """What goes wrong under one random schedule; empty: nothing. warps: that fetch keys from pages, and as many values;
    0: there are no pages. idle: warps of each that have no part and go along. rooms: for loads that are told; 0: there are none."""
    schedule = random.Random(seed)
    faults = []
    q = Ring(q_stages, groups // shares, faults, 2 if rooms > 0 else 1)
    k, v = (Ring(STAGES, groups, faults, max(warps, 1)) for _ in range(2))
    turns = [Turn() for _ in range(groups)]
    if rooms > 0:
        loads = Ring(rooms, 1, faults)
        running = [schedule_tiles(tiles, shares, q, loads), load_scheduled(tiles, shares, q, k, v, loads)]
    elif warps == 0:
        running = [produce(tiles, shares, q, k, v, late)]
    else:
        running = [hand_out_pages(tiles, shares, q, k)]
        running += [fetch_pages(tiles, k, w < warps) for w in range(1, warps + idle)]
        running += [fetch_pages(tiles, v, w < warps) for w in range(warps + idle)]
    running += [consume(g, tiles, shares, skips, turns, q, k, v, waits, clears, turn_late, writes_first=writes_first)
                for g in range(groups)]
    return run(schedule, running, 4000 * (sum(tiles) + len(tiles)), faults,
               speeds=(1,) if warps == rooms == 0 else (1, 1, 5, 25))


def fault_of_pair(seed, q_stages, shares, tiles, skips, sums_wait=True):
    """The same of two blocks that share tiles."""
    schedule = random.Random(seed)
    faults, running = [], []
    sums = [Sums(faults, sums_wait) for _ in range(2)]  # of each warpgroup
    for block in range(2):
        q = Ring(q_stages, 2 // shares, faults)
        k, v = (Ring(STAGES, 2, faults) for _ in range(2))
        turns = [Turn(), Turn()]
        running.append(produce(tiles, shares, q, k, v, late=False))
        running += [consume(group, tiles, shares, skips, turns, q, k, v, True, seed % 2 == 0, False,
                            functools.partial(sums[group].add, block)) for group in range(2)]
    return run(schedule, running, 8000 * (sum(tiles) + len(tiles)), faults)


SKIPS = {
    "nobody": lambda tile, group, last: 0,
    "the first": lambda tile, group, last: int(group == 0),
    "the first, every other tile": lambda tile, group, last: int(group == 0 and tile % 2),
    "all but the last": lambda tile, group, last: int(group < last),
}


def main():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seed {first}")
    runs, unwaited, late, late_for_all, idle, unread, crowded = 0, 0, 0, 0, 0, 0, 0
    for groups in (2, 3):
        for q_stages, shares in ((1, 1), (2, 1), (groups, groups), (groups + 1, groups)):
            for name, skips in SKIPS.items():
                for tiles in ([4] * 5, [2] * 7, [2, 3, 2, 5, 2], [0, 2, 0, 0, 0, 3, 2, 0], [0, 0, 0],
                              [1, 0, 0, 0, 1, 1, 0, 0, 0, 2]):
                    if name != "nobody" and 1 in tiles:
                        continue  # nobody passes over an only block
                    for seed in range(first, first + 24):
                        runs += 1
                        clears = seed % 2 == 0
                        problem = (seed, groups, q_stages, shares, tiles, skips)
                        warps = max(seed % 5 - 2, 0)
                        found = fault(*problem, clears=clears, turn_late=seed % 4 > 1, warps=warps) or fault(
                            *problem, writes_first=True, turn_late=seed % 4 > 1) or fault(
                            *problem, writes_first=seed % 3 > 0, rooms=AHEAD)
                        if found:
                            sys.exit(f"{groups} warpgroups, {name} skips, tiles {tiles}, {warps} warps a ring, "
                                     f"seed {seed}: {found}")
                        # A seed is a schedule's speeds, the same in all problems, so this takes many of them.
                        if name == "nobody" and tiles == [4] * 5:
                            idle += fault(*problem, warps=1, idle=1) != ""
                        if seed >= first + 6:
                            continue
                        crowded += fault(*problem, writes_first=True, rooms=1) != ""
                        if groups == 2 and (q_stages, shares) in ((1, 1), (2, 1)):
                            of_pair = (seed, q_stages, shares, tiles, skips)
                            if found := fault_of_pair(*of_pair):
                                sys.exit(f"two blocks, {name} skips, tiles {tiles}, seed {seed}: {found}")
                            unread += fault_of_pair(*of_pair, sums_wait=False) != ""
                        if name == "the first":
                            unwaited += fault(*problem, waits=False) != ""
                        if clears:
                            late += fault(*problem, clears=True, late=True) != ""
                            late_for_all += fault(*problem, writes_first=True, late=True) != ""
    if not unwaited or not late or not late_for_all or not idle or not unread or not crowded:
        sys.exit("a skip that does not wait, values that come late, a warp without a part, scores that are not "
                 "waited for, or loads that are overwritten went unseen")
    print(f"{runs} schedules; a skip that does not wait is seen in {unwaited}, late values in {late} and, of who needs "
          f"them before the next tile, in {late_for_all}, a warp without a part in {idle}, scores that are not waited "
          f"for in {unread}, loads without room in {crowded}")


if __name__ == "__main__":
    main()
