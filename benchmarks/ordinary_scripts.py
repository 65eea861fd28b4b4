"""Random ordinary training scripts on 3 real processes: does each end, and end right?

Scripts come from `tests/ordinary.py`, by seed. Each failing one is printed with what is in it, what
is wrong, and, if it hung, the stacks of its workers; then a table of the ways to fail. The exit
status is 1 if any failed.

    python benchmarks/ordinary_scripts.py --count 300 [--seed FIRST] [--busy N] [--limit SECONDS]
                                          [--algorithms NAME ...] [--json FILE] [--quick]

`--seed N` alone replays one script. `--algorithms` leaves out the seeds of all others. `--busy 4`
runs four busy loops beside it, which brings about orders of events that an idle machine does not.
`--quick`: 20 scripts.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import ordinary
from pool import Pool


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run so many processes that do nothing, and do it all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _name(seed: int) -> str:
    return ordinary.draw(seed).algorithm.split("(")[0]


def main() -> int:
    parser = common.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, help="how many; 300, or 1 with --seed")
    parser.add_argument("--seed", type=int, help="of the first; 0")
    names = list(ordinary.ALGORITHMS)
    parser.add_argument("--algorithms", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside it")
    parser.add_argument("--limit", type=float, default=ordinary.LIMIT_S, help="seconds a script")
    given = parser.parse_args()
    first = given.seed or 0
    default = 20 if given.quick else 300 if given.seed is None else 1
    wanted = default if given.count is None else given.count
    seeds = list(islice((seed for seed in count(first) if _name(seed) in given.algorithms), wanted))

    kinds: Counter[str] = Counter()
    failed: list[ordinary.Verdict] = []
    began = time.monotonic()
    with busy_loops(given.busy), Pool(ordinary.WORKERS) as pool:
        for seed in seeds:
            script = ordinary.draw(seed)
            if len(seeds) == 1:
                print(script, flush=True)
            verdict = ordinary.judged(pool, script, given.limit)
            kinds[verdict.kind] += 1
            if verdict.complaints:
                failed.append(verdict)
                print(f"{verdict}\n", flush=True)
        starts = pool.starts

    seconds = time.monotonic() - began
    print(f"{len(failed)} of {len(seeds)} scripts failed, in {seconds:.0f} s")
    for kind, times in kinds.most_common():
        print(f"{times:5}  {kind}")
    figures = {
        "first_seed": first,
        "algorithms": given.algorithms,
        "scripts": len(seeds),
        "failed": len(failed),
        "kinds": dict(kinds.most_common()),
        "failing_seeds": {verdict.script.seed: verdict.kind for verdict in failed},
        "busy_loops": given.busy,
        "limit_s": given.limit,
        "pools": starts,
        "seconds": round(seconds, 1),
    }
    common.write(given.json, figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
