"""All benchmarks, one table, and the same as JSON: `make bench`.

python -m tests.bench.run [--quick] [--only collector latency] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .figures import Figure, machine

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
# Of one benchmark, in seconds: none needs half of it on a quiet machine.
_PATIENCE = 600


def names() -> list[str]:
    """The benchmarks, by what follows `bench_`."""
    return sorted(path.stem.removeprefix("bench_") for path in _HERE.glob("bench_*.py"))


def measure(name: str, quick: bool) -> tuple[list[Figure], dict[str, object]]:
    """Run one in a process of its own; its figures, and how it went."""
    with tempfile.TemporaryDirectory(prefix="rankd-bench-") as folder:
        result = Path(folder) / "figures.json"
        line = [sys.executable, "-m", f"tests.bench.bench_{name}", "--json", str(result), *["--quick"] * quick]
        before, started = machine(), time.monotonic()
        try:
            done = subprocess.run(line, cwd=_ROOT, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            failure = None if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {_PATIENCE} s"
        how = {"seconds": round(time.monotonic() - started, 1), "load_before": before["load"], "failure": failure}
        if failure is not None:
            return [], how
        rows = json.loads(result.read_text())
    for row in rows:
        del row["met"]
    return [Figure(**row) for row in rows], how


def main() -> int:
    """0: every bound was met; 1: one was missed, or a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small loads and few repetitions: to see that all work")
    parser.add_argument("--only", nargs="+", choices=names(), metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--json", type=Path, default=Path("bench-results.json"), help="default: bench-results.json")
    args = parser.parse_args()
    print("{cores} cores, {machine}, load {load}".format(**machine()), flush=True)
    results, good = [], True
    for name in args.only or names():
        figures, how = measure(name, args.quick)
        print(f"-- {name} ({how['seconds']} s, load {how['load_before']})", flush=True)
        if how["failure"]:
            print(f"FAILED: {how['failure']}", flush=True)
        for figure in figures:
            print(figure.row(), flush=True)
        good = good and not how["failure"] and all(figure.met is not False for figure in figures)
        rows = [
            {"name": f.name, "measured": f.measured, "unit": f.unit, "bound": f.bound, "at_least": f.at_least}
            | {"met": f.met, "note": f.note}
            for f in figures
        ]
        results.append({"benchmark": name, **how, "figures": rows})
    args.json.write_text(json.dumps({**machine(), "results": results}, indent=2) + "\n")
    print(f"written to {args.json}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
