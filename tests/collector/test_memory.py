"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import resource, sys
from rankd.collector.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    texts = [bytes(100_000) for _ in range(20)]
    return len(texts)
use()
before = faults()
for _ in range(20):
    use()
print(faults() - before)
"""


def test_what_is_freed_is_taken_again_without_page_faults() -> None:
    """Twenty times two megabytes: the pages are those of the first time."""
    counts = {}
    for kind in ("kept", "given back"):
        done = subprocess.run([sys.executable, "-c", CHILD, kind], capture_output=True, text=True, check=True)
        counts[kind] = int(done.stdout)
    assert counts["kept"] < 1_000 < counts["given back"], counts
