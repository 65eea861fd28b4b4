"""Leverage scores by a masked SVD: FedCBDR as its paper has it, with the un-masking it needs.

Qi et al., NeurIPS 2025, arXiv 2507.07712, equations 1 to 6.

    client k:  Z_k <- P_k X_k Q                P_k orthogonal, its own; Q orthogonal, the clients'
    server:    U S V' <- SVD of all Z_k, one below the other;  send the rows U_k back, r columns
    client k:  U_k <- P_k' U_k                 else a row is a mixture of this client's samples
               leverage_j <- || row j of U_k ||²

Differs from the printed equations: U is thin (the full one has rows of length 1, all of them).
Differs from the authors' code: one SVD for all clients, not one each; and the un-masking, which is
missing there (`unmask=False`): without it scores are nearly uniform over a client's samples.

Do not use but to compare: whoever knows Q, and every client does, gets from Z_k the Gram matrix of
that client alone, and the server sees row counts and singular values. gram.py has the same scores
from a sum. P_k costs a QR of n_k x n_k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.federated.gram import cut
from offbeat.worlds import Channel


def orthogonal(size: int, draw: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix, uniform over all."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
    uniform: Tensor = q * r.diagonal().sign()
    return uniform


def rows(masked: Sequence[Tensor], rank: int) -> list[Tensor]:
    """The server's part: the rows of the thin U that belong to each client, r columns."""
    u, s, _ = torch.linalg.svd(torch.cat(list(masked)), full_matrices=False)
    real = s[:rank].square() > cut(s.square(), masked[0].shape[1])
    return list(u[:, :rank][:, real].split([len(each) for each in masked]))


def scores(rows: Tensor, mask: Tensor, unmask: bool = True) -> Tensor:
    """The client's part: the leverage of its samples."""
    return (mask.T @ rows if unmask else rows).square().sum(dim=1)


def leverage(
    channel: Channel,
    rank_of: int,
    features: Tensor,
    rank: int,
    *,
    private: torch.Generator,
    shared: torch.Generator,
    unmask: bool = True,
) -> tuple[Tensor, int]:
    """Return this client's scores, and the bytes it has sent; the first member is the server."""
    members, wide = channel.members, features.double()
    mask = orthogonal(len(wide), private)
    mine = (mask @ wide @ orthogonal(wide.shape[1], shared)).contiguous()
    counts = torch.empty(len(members), 1, dtype=torch.int64)
    channel.all_gather(torch.tensor([len(mine)]), counts).wait()
    sizes = dict(zip(members, counts.flatten().tolist(), strict=True))
    server, others = members[0], [each for each in members[1:] if sizes[each]]
    width = torch.zeros(1, dtype=torch.int64)
    if rank_of == server:
        came = {each: torch.empty(sizes[each], wide.shape[1]).double() for each in others}
        channel.exchange({}, came).wait()
        got = [server, *others] if sizes[server] else others
        cut_rows = rows([came.get(each, mine) for each in got], rank)
        back = dict(zip(got, cut_rows, strict=True))
        width.fill_(cut_rows[0].shape[1])
        channel.broadcast(width, server).wait()
        channel.exchange({each: back[each].contiguous() for each in others}, {}).wait()
        own = back.get(server, mine.new_zeros(0, int(width)))
    else:
        if len(mine):
            channel.exchange({server: mine}, {}).wait()
        channel.broadcast(width, server).wait()
        own = mine.new_zeros(len(mine), int(width))
        if len(mine):
            channel.exchange({}, {server: own}).wait()
    return scores(own, mask, unmask), mine.numel() * 8
