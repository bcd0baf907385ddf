#!/usr/bin/env python3
"""What racecheck and synccheck of compute-sanitizer say of named barriers: programs of two or three warps.

    python3 tests/sanitizers/barriers.py COMPUTE_SANITIZER     runs each program under both tools, and prints a table
    python3 tests/sanitizers/barriers.py --run NAME            runs one program, without a tool

Needs a GPU from sm_70 on, its driver, and the standard library. Each warp of a program executes the steps of its line in PROGRAMS.
PTX ISA, "barrier{.cta}": what a warp did before it arrives or waits at a barrier is ordered before what a warp does behind its wait there;
that order is transitive. Whole warps may wait for one barrier at different instructions.
"""
import ctypes
import subprocess
import sys
from ctypes import byref, c_int, c_ulonglong, c_void_p

# A step of a warp: `store` and `load` of its lane's word of shared memory, `arrive B` and `wait B` at a barrier of two warps, `all` at
# barrier 0 of all warps, in code of the warp's own. Then whether PTX orders the accesses, and whether all is allowed.
PROGRAMS = {
    "a race": (["store", "load"], False),
    "two warps, one barrier": (["store, arrive 1", "wait 1, load"], True),
    "one barrier, stored again": (["store, arrive 1, wait 2, store", "wait 1, load, arrive 2"], True),
    "a chain by a third warp": (["store, arrive 1", "wait 2, load", "wait 1, arrive 2"], True),
    "a chain, stored again": (["store, arrive 1, wait 3, store", "wait 1, load, arrive 2", "wait 2, arrive 3"], True),
    "a chain, all wait": (["store, wait 1", "wait 2, load", "wait 1, wait 2"], True),
    "a chain without its link": (["store, arrive 1", "wait 2, load", "arrive 2, wait 1"], False),
    "barrier 0, three places": (["store, all", "all, load", "all"], True),
}


# What a program prints once all of its launches have ended without an error.
RAN = "all launches have ended"


def ptx(steps):
    """The program as PTX: each warp jumps to its own steps."""
    threads = 32 * len(steps)
    words = {
        "store": "st.shared.u32 [at], thread;",
        "load": "ld.shared.u32 value, [at];",
        "all": "barrier.cta.sync.aligned 0;",
        "arrive": "barrier.cta.arrive.aligned {}, 64;",
        "wait": "barrier.cta.sync.aligned {}, 64;",
    }
    body = []
    for warp, line in enumerate(steps):
        body += [f"setp.ne.u32 other, warp, {warp};", f"@other bra.uni after_{warp};"]
        for step in line.split(", "):
            name, *barrier = step.split()
            body.append(words[name].format(*barrier))
        body.append(f"after_{warp}:")
    return "\n".join([
        ".version 8.0", ".target sm_70", ".address_size 64",
        f".visible .entry program(.param .u64 out) .maxntid {threads}, 1, 1", "{",
        ".reg .u32 thread, warp, lane, at, value;", ".reg .u64 to, offset;", ".reg .pred other;",
        ".shared .align 4 .b8 memory[128];",
        "ld.param.u64 to, [out];", "mov.u32 thread, %tid.x;", "shr.u32 warp, thread, 5;", "and.b32 lane, thread, 31;",
        "mov.u32 at, memory;", "mad.lo.u32 at, lane, 4, at;", "mov.u32 value, 0;", *body,
        "mul.wide.u32 offset, thread, 4;", "add.u64 to, to, offset;", "st.global.u32 [to], value;", "ret;", "}", "",
    ])


def call(driver, name, *arguments):
    function = getattr(driver, name)
    function.restype = c_int
    code = function(*arguments)
    if code:
        sys.exit(f"{name}: error {code}")


def run(steps):
    """Launches the program 20 times."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context, module, function, out = c_int(), c_void_p(), c_void_p(), c_void_p(), c_ulonglong()
    call(driver, "cuInit", 0)
    call(driver, "cuDeviceGet", byref(device), 0)
    call(driver, "cuDevicePrimaryCtxRetain", byref(context), device)
    call(driver, "cuCtxSetCurrent", context)
    call(driver, "cuModuleLoadData", byref(module), ptx(steps).encode())
    call(driver, "cuModuleGetFunction", byref(function), module, b"program")
    call(driver, "cuMemAlloc_v2", byref(out), 4096)
    arguments = (c_void_p * 1)(ctypes.addressof(out))
    for _ in range(20):
        call(driver, "cuLaunchKernel", function, 1, 1, 1, 32 * len(steps), 1, 1, 0, None, arguments, None)
    call(driver, "cuCtxSynchronize")
    print(RAN)


def says(tool, sanitizer, name):
    """Whether the tool reports something in the program."""
    command = [sanitizer, "--tool", tool, sys.executable, __file__, "--run", name]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if "SUMMARY" not in text or RAN not in text:
        sys.exit(f"{' '.join(command)}: no summary, or the program failed\n{text}")
    return "reports" if "========= Error:" in text or "Barrier error" in text else "nothing"


def main():
    if sys.argv[1:2] == ["--run"]:
        return run(PROGRAMS[sys.argv[2]][0])
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("| program | ordered by PTX | racecheck | synccheck |\n|---|---|---|---|")
    for name, (_, is_ordered) in PROGRAMS.items():
        found = [says(tool, sys.argv[1], name) for tool in ("racecheck", "synccheck")]
        print(f"| {name} | {'yes' if is_ordered else 'no'} | {found[0]} | {found[1]} |", flush=True)
    return None


if __name__ == "__main__":
    main()
