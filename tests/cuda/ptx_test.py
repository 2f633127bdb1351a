"""PTX of a build, without a GPU: every file is what a driver's compiler takes.

    ptx_test.py

ptxas, which drivers have inside, assembles it for GPUs that run PTX. The files state an old version, so that
old drivers take them, which nothing promises: it is tried here. TESSERA_PTXAS names ptxas, of the wheel
nvidia-cuda-nvcc or the CUDA toolkit; without it the test is skipped, as it takes long. What is spilled on a GPU
for which a row was not made is printed, and may not be much. TESSERA_BUILD names the build.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(os.environ.get("TESSERA_BUILD", "build/release")) / "cubins"
TARGETS = ("sm_90", "sm_100")
SKIPPED = 77  # as CTest is told
MOST_SPILLED = 160  # bytes of a thread
NEWEST = (8, 3)  # a version that drivers of CUDA 12.3 take


def faults_of(ptxas, file, target):
    """(what is wrong, or nothing; bytes that a thread stores beside its registers)."""
    made = subprocess.run([ptxas, "-v", f"-arch={target}", file, "-o", os.devnull], capture_output=True, text=True,
                          check=False)
    log = made.stdout + made.stderr
    if made.returncode:
        return f"{file.name}: {target}: {log.splitlines()[0] if log else 'fails'}", 0
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log)), default=0)
    if spilled > MOST_SPILLED:
        return f"{file.name}: {target}: spills {spilled} bytes", spilled
    return "", spilled


def main():
    ptxas = os.environ.get("TESSERA_PTXAS")
    if not ptxas:
        print("TESSERA_PTXAS names no ptxas")
        sys.exit(SKIPPED)
    files = sorted(FOLDER.glob("*.compute_*.cubin"))
    if not files:
        sys.exit(f"{FOLDER} has no PTX")
    faults = []
    for file in files:
        version = re.search(r"^\.version (\d+)\.(\d+)$", file.read_text(), re.MULTILINE)
        if tuple(map(int, version.groups())) > NEWEST:
            faults.append(f"{file.name}: {version[0]} is newer than {NEWEST}")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        work = {(file, target): pool.submit(faults_of, ptxas, file, target) for file in files for target in TARGETS}
        for (file, target), result in work.items():
            fault, spilled = result.result()
            if fault:
                faults.append(fault)
            elif spilled:
                print(f"{file.name}: {target}: {spilled} bytes are spilled")
    print(f"{len(files)} files of PTX for {', '.join(TARGETS)}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
