"""What the compiler made of every GPU row for every GPU that a build has machine code for, without a GPU.

    kernels_test.py [--update]

Registers, barriers and shared memory of every kernel, the instructions of its loop over unmasked blocks of
keys (backward: of rows), and of all of it, are those of kernels.golden: a change of the code or of the
compiler shows here before it shows as lost time. Whatever the golden file says, no kernel may spill or use
local memory, those that are no rows of the catalog included, its registers fit the multiprocessor, and the
loop holds what one block needs and no more: each wgmma once, an exponential a score, and in the forward two
named barriers and no move of wgmma's descriptors out of the uniform registers (R2UR), which costs 10 %. Where
the backward's warpgroups have roles, each has such a loop. That of a forward by mma.sync multiplies and loads
each fragment once; on Turing a product is two.

The numbers are those of NVRTC 13.0; another version is checked by the rules alone. Machine code whose digest
is in the golden file was looked at when that was written, by the same rules, and is not disassembled again: that
takes half a second a kernel. The disassembler comes from the wheel nvidia-cuda-nvdisasm or the CUDA toolkit
(TESSERA_NVDISASM names it); without it the instructions are left out. --update writes the golden file anew, for
the targets of this build. TESSERA_BUILD names the build; of PTX, which the driver compiles, nothing is known.
"""

import collections
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

FOLDER = pathlib.Path(os.environ.get("TESSERA_BUILD", "build/release")) / "cubins"
GOLDEN = pathlib.Path(__file__).with_name("kernels.golden")
NVRTC = "13.0"
COLUMNS = ("registers", "barriers", "threads", "shared_bytes", "instructions", "loop", "r2ur")
DISASSEMBLED = ("instructions", "loop", "r2ur")
DIGEST = "digest"  # none where a rule is broken, and where nothing was disassembled
NONE = "-"
RULES = pathlib.Path(__file__).read_bytes()
REGISTERS = 65536  # of a multiprocessor


def disassembler():
    named = os.environ.get("TESSERA_NVDISASM")
    if named and not os.access(named, os.X_OK):
        sys.exit(f"TESSERA_NVDISASM = {named}: not a program")
    return named or shutil.which("nvdisasm")


def read_kernels():
    """(NVRTC's version, {symbol.target: facts that the catalog row decides, none if it is no row})."""
    header, *lines = (FOLDER / "kernels.txt").read_text().splitlines()
    names = header.split()[2:]
    rows = {}
    for line in lines:
        symbol, target, *values = line.split()
        if not target.startswith("compute_"):
            facts = dict(zip(names, map(int, values)))
            rows[f"{symbol}.{target}"] = facts and {**facts, "e4m3": "_e4m3_" in symbol, "bf16": "_bf16_" in symbol,
                                                     "pair": symbol.endswith("_pair")}
    return header.split()[1], rows


def resources(symbol):
    """(bytes of stack and spills, registers and barriers) of a cubin, which may hold several kernels."""
    log = (FOLDER / f"{symbol}.log").read_text()
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.findall(r"Used (\d+) registers, used (\d+) barriers", log)
    most = {name: max(map(int, values)) for name, values in zip(("registers", "barriers"), zip(*used))}
    return sum(int(x) for spill in spills for x in spill), most


def instructions(nvdisasm, symbol):
    """(names of the instructions in order, {label: index of what follows it}, [(index, label of a branch)])."""
    text = subprocess.run([nvdisasm, "-c", "-ndf", FOLDER / f"{symbol}.cubin"], check=True,
                          capture_output=True, text=True).stdout
    names, labels, branches = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);", line):
            if found[1].startswith("BRA") and (target := re.search(r"`\((\.L_\S+)\)", found[2])):
                branches.append((len(names), target[1]))
            names.append(found[1])
    return names, labels, branches


def block_loops(names, labels, branches):
    """Loops over blocks of keys or rows: they multiply, and no loop inside them does."""
    loops = [(labels[target], end) for end, target in branches if labels.get(target, end + 1) <= end]
    products = ("HGMMA", "QGMMA", "IGMMA", "HMMA")
    loops = [loop for loop in loops if any(n.startswith(products) for n in names[loop[0]:loop[1] + 1])]
    return [loop for loop in loops
            if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)]


def role_loops(row):
    """What a step of either warpgroup holds where they have roles. Backward (backward_wide.h): it makes its scores,
    sums, and multiplies its pieces of dQ, the keys the odd one. The values alone have exponentials; softcap needs two
    more instructions of the unit a score."""
    if row["qv"]:
        # Of values of 8 bits (latent_scorer.h, latent_owner.h). Queries of bf16 are sums of two e4m3, whose products
        # lie side by side, or with 64 rows follow each other. A weight has an exponential. Where shifts are raised,
        # each sum that a thread has of them follows, and a row. There are two divisions by what weights lack; of more
        # than 16 rows two by the greatest scales of a thread's keys, of fp16 before products with queries, too.
        rows, pairs = row["block_m"], row["bf16"]
        raised = (2 if rows == 64 and not pairs else rows // 4) + 1
        divisions = 2 if rows == 16 else 4 if pairs else 6
        of_values = row["head_dim_v"] // 32 * (2 if rows == 64 else 1) if pairs else row["head_dim_v"] // 16
        products = {"QGMMA": of_values, "HGMMA": row["head_dim"] // 16} if pairs else {
            "QGMMA": 0, "HGMMA": row["head_dim"] // 16 + of_values}
        return {"scorers": {**products, "MUFU": rows // 2 + raised + divisions},
                "owners": {"HGMMA": row["head_dim_v"] // 128 * row["block_n"] // 16, "MUFU": 0}}
    if row["stages"]:
        return {role: mma_backward_loops(row)[role] for role in ("values", "keys")}
    # A pair of blocks shares the pieces, and each sums its own over the keys of both (backward_exchange.h).
    pieces, scores = row["head_dim"] // 64 // (2 if row["pair"] else 1), row["block_m"] // 2
    sums, piece = row["block_m"] // 16, row["block_n"] // 16
    return {"values": {"HGMMA": row["head_dim"] // 16 + sums + pieces // 2 * piece,
                       "MUFU": scores * (3 if row["extra"] else 1)},
            "keys": {"HGMMA": row["head_dim_v"] // 16 + sums + (pieces - pieces // 2) * piece, "MUFU": 0}}


def mma_loop(row):
    """What the loop of a forward by mma.sync holds, of a warp: two products of 8 keys or columns for each fragment
    of 16, and the fragments of queries where they are not in registers. Where they are, and there are two buffers,
    a step without a mask is there besides. Warps that share rows have a part of the keys and of the columns each,
    and load the weights of all."""
    rows, d, dv, keys = (row[name] for name in ("tile_m", "head_dim", "head_dim_v", "block_n"))
    groups, held = rows // 16, rows * d <= 32 * 64
    steps = 2 if held and row["stages"] == 2 else 1
    parts = row["threads"] // 32 * rows // row["block_m"]
    fragments = keys // 16 * steps * (d + dv) // 16 // parts
    weights = groups * keys // 16 if parts > 1 else 0
    return {"HMMA": groups * 2 * fragments * row["halves"], "LDSM": fragments + weights + (0 if held else groups * d // 16)}


def mma_backward_loops(row):
    """The same of a backward: all five products, or each role's and its exponentials. dQ is shared out among all
    warps, half of the rows each."""
    groups, queries, keys = row["tile_m"] // 16, row["block_m"], row["block_n"]
    d, dv, warps = row["head_dim"], row["head_dim_v"], row["threads"] // 32
    s, dp = (groups * queries // 8 * dim // 16 for dim in (d, dv))
    dk, dv = (groups * dim // 8 * queries // 16 for dim in (d, dv))
    dq = queries // 32 * keys // 16 * 2 * (d // 16 // (warps // 2))
    weights = groups * queries // 2 * (3 if row["extra"] else 1)
    s, dp, dk, dv, dq = (products * row["halves"] for products in (s, dp, dk, dv, dq))
    return {"both": {"HMMA": s + dp + dk + dv + dq, "MUFU": weights},
            "values": {"HMMA": s + dv + dq, "MUFU": weights}, "keys": {"HMMA": dp + dk + dq, "MUFU": 0}}


def wanted_loop(row):
    """What the loop of a row without extras or roles holds."""
    if row["stages"] and row["backward"]:
        return mma_backward_loops(row)["both"]
    if row["stages"]:
        return mma_loop(row)
    if row["backward"]:
        products = {"S": row["head_dim"], "dP": row["head_dim_v"], "dV": row["block_m"], "dK": row["block_m"],
                    "dQ": row["block_n"]}  # what each sums over
        return {"HGMMA": sum(products.values()) // 16, "MUFU": row["block_m"] // 2}
    if row["qv"]:
        # Shifts are raised in the same loop; the block's owner makes its scores.
        return {"HGMMA": (row["head_dim"] + row["head_dim_v"]) // 16 + row["head_dim_v"] // 128 * row["block_n"] // 16,
                "MUFU": row["block_m"] // 2 + row["block_m"] // 4 + 1}
    if row["scores"] == 32 and row["values"] == 16:
        # Integer scores; references are raised in the same loop, by greatest scores.
        return {"IGMMA": row["head_dim"] // 32, "HGMMA": row["block_n"] // 16, "MUFU": row["block_n"] // 2 + 2,
                "I2F": 0, "SHFL": 4, "BAR": 2}
    if row["values"] == 32:
        # The sums of weights are columns of O, of which one wgmma has at most 256. Before each of two parts
        # references may be raised, for which the mean of some scores is looked for, too. A division is where sums
        # are promoted; and two more where they are rounded, and what is left goes on in another scale.
        divisions = 3 if row["head_dim_v"] == 256 and row["block_n"] == 128 else 1
        return {"QGMMA": row["head_dim"] // 32 + row["block_n"] // 32 * ((row["head_dim_v"] + 8) // 257 + 1),
                "MUFU": row["block_n"] // 2 + 4 + divisions, "VIMNMX3": row["block_n"] // 4, "SHFL": 16, "BAR": 2}
    return {"HGMMA": row["head_dim"] // 16 + row["block_n"] // 16,
            "MUFU": row["block_n"] // 2 + 2,  # of a thread: a score each, and two rescaling factors
            "VIMNMX3": 0, "SHFL": 4,  # the greatest score is only looked for where weights turn out too large
            "BAR": 2, "R2UR": 0}


def steady_loop(row, loops):
    """(faults, the loop over unmasked blocks) of loops = [(instructions, counts by name)], shortest first."""
    def faults(counts, wanted):
        return [f"{name} {counts[name]} times, not {count}" for name, count in wanted.items()
                if counts[name] != count]

    if not row["splits_roles"] and not (row["qv"] and row["e4m3"]):
        return [] if row["extra"] else faults(loops[0][1], wanted_loop(row)), loops[0]
    fitting = {role: [loop for loop in loops if not faults(loop[1], wanted)]
               for role, wanted in role_loops(row).items()}
    missing = [f"none of {len(loops)} is that of the {role}: {role_loops(row)[role]}"
               for role, found in fitting.items() if not found]
    return missing, min([loop for found in fitting.values() for loop in found] or loops, key=lambda loop: loop[0])


def digest_of(symbol, row):
    """Of machine code, its row, and the rules that it is looked at by."""
    facts = repr(sorted(row.items())).encode()
    return hashlib.sha256(RULES + facts + (FOLDER / f"{symbol}.cubin").read_bytes()).hexdigest()[:16]


def faults_and_facts(symbol, row, nvdisasm, known):
    """known: what the golden file has of it."""
    spilled, facts = resources(symbol)
    faults = [f"{spilled} bytes of stack and spills"] if spilled else []
    if "instructions are serialized" in (FOLDER / f"{symbol}.log").read_text():
        faults.append("products of wgmma wait for each other (C7512)")
    digest = digest_of(symbol, row)
    if row and known.get(DIGEST) == digest:
        seen = {name: known[name] for name in (*DISASSEMBLED, DIGEST)}
        return faults, facts | {name: row[name] for name in ("threads", "shared_bytes")} | seen
    names, labels, branches = instructions(nvdisasm, symbol) if nvdisasm else ([], {}, [])
    faults += [f"{n} (local memory)" for n in set(names) if re.match(r"(LDL|STL)\b", n)]
    if not row:
        return faults, {}
    row = row | {"halves": 2 if symbol.endswith(".sm_75") else 1}
    facts |= {name: row[name] for name in ("threads", "shared_bytes")}
    if facts["registers"] * row["threads"] * row["blocks"] > REGISTERS:
        faults.append(f"{facts['registers']} registers for {row['blocks']} times {row['threads']} threads")
    if nvdisasm:
        loops = [(end - begin + 1, collections.Counter(n.split(".")[0] for n in names[begin:end + 1]))
                 for begin, end in block_loops(names, labels, branches)]
        found, (length, counts) = steady_loop(row, sorted(loops, key=lambda loop: loop[0]))
        facts |= {"instructions": len(names), "loop": length, "r2ur": counts["R2UR"]}
        faults += [f"loop: {fault}" for fault in found]
    return faults, facts | {DIGEST: digest if nvdisasm and not faults else NONE}


def read_golden():
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {symbol: dict(zip(COLUMNS, map(int, values))) | {DIGEST: digest} for symbol, *values, digest in lines}


def write_golden(facts):
    header = "# NVRTC " + NVRTC + ": symbol.target " + " ".join([*COLUMNS, DIGEST])
    lines = [" ".join([symbol, *(str(values[c]) for c in (*COLUMNS, DIGEST))]) for symbol, values in facts.items()]
    GOLDEN.write_text("\n".join([header, *lines]) + "\n")


def main():
    if not (FOLDER / "kernels.txt").is_file():
        print("this build has no GPU kernels: nothing to look at")
        return
    version, rows = read_kernels()
    nvdisasm = disassembler()
    if not nvdisasm:
        print("no nvdisasm: instructions are left out")
    golden = read_golden()
    faults, facts = [], {}
    for symbol, row in rows.items():
        found, known = faults_and_facts(symbol, row, nvdisasm, golden.get(symbol, {}) if version == NVRTC else {})
        faults += [f"{symbol}: {fault}" for fault in found]
        if row:
            facts[symbol] = known
    targets = {symbol.split(".")[1] for symbol in rows}
    if "--update" in sys.argv[1:]:
        if not nvdisasm or version != NVRTC:
            sys.exit(f"--update needs nvdisasm and NVRTC {NVRTC}")
        others = {symbol: values for symbol, values in golden.items() if symbol.split(".")[1] not in targets}
        write_golden(others | facts)
    if version == NVRTC:
        golden = {symbol: values for symbol, values in read_golden().items() if symbol.split(".")[1] in targets}
        for symbol in sorted(golden.keys() | facts.keys()):
            was, now = golden.get(symbol, {}), facts.get(symbol, {})
            faults += [f"{symbol}: {c} = {now.get(c)}, kernels.golden has {was.get(c)}" for c in COLUMNS
                       if now.get(c) != was.get(c) and (nvdisasm or c not in DISASSEMBLED)]
    else:
        print(f"NVRTC {version}: the golden numbers are those of {NVRTC}")
    print(f"{len(rows)} kernels for {', '.join(sorted(targets)) or 'no GPU'}, NVRTC {version}")
    if faults:
        sys.exit("\n".join(faults) + "\nkernels_test.py --update writes kernels.golden anew")


if __name__ == "__main__":
    main()
