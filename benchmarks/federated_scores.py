"""Leverage scores by sums of Gram matrices, and by the masked SVD: bytes and seconds.

    python benchmarks/federated_scores.py --json benchmarks/results/federated_scores.json

Five clients with as many samples each, drawn features, ten classes' worth of directions. Seconds
are of the processor, one thread: those of one client, and those of the server, which by Gram
matrices every client is. Bytes are what one client uploads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import options, write

from offbeat.federated import gram, masked_svd

CLIENTS, RANK, REPEATS = 5, 10, 3
SIZES = ((64, 400), (64, 2000), (512, 400), (512, 2000))
"""Features (64: the small nets; 512: ResNet-18), and samples of a client."""
QUICK = SIZES[:1]


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """The median of a few times, and what it returned."""
    took = []
    for _ in range(REPEATS):
        began = time.process_time()
        result = work()
        took.append(time.process_time() - began)
    return statistics.median(took), result


def compared(width: int, count: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(count, width, generator=draw) for _ in range(CLIENTS)]
    summed_s, one = seconds(lambda: gram.gram(parts[0]))
    total = torch.stack([gram.gram(each) for each in parts]).sum(0)
    white_s, whitening = seconds(lambda: gram.whitening(total, RANK))
    scored_s, by_gram = seconds(lambda: gram.leverage(parts[0], whitening))
    masks = [masked_svd.orthogonal(count, draw) for _ in parts]
    shared = masked_svd.orthogonal(width, draw)
    mask_s, _ = seconds(lambda: masked_svd.orthogonal(count, draw))
    hide_s, _ = seconds(lambda: masks[0] @ parts[0].double() @ shared)
    uploads = [mask @ each.double() @ shared for mask, each in zip(masks, parts, strict=True)]
    server_s, rows = seconds(lambda: masked_svd.rows(uploads, RANK))
    unmask_s, by_svd = seconds(lambda: masked_svd.scores(rows[0], masks[0]))
    return {
        "features": width,
        "samples_of_a_client": count,
        "gram_bytes": one.numel() * 8,
        "svd_bytes": uploads[0].numel() * 8,
        "gram_client_s": summed_s + white_s + scored_s,
        "svd_client_s": mask_s + hide_s + unmask_s,
        "svd_server_s": server_s,
        "largest_difference": float((by_gram - by_svd).abs().max()),
    }


def main() -> None:
    asked = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = [compared(*size) for size in (QUICK if asked.quick else SIZES)]
    for row in rows:
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    write(asked.json, {"clients": CLIENTS, "rank": RANK, "rows": rows})


if __name__ == "__main__":
    main()
