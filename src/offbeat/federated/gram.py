"""Leverage scores from a sum of Gram matrices: what FedCBDR needs its masked SVD for, without it.

With X the features of all clients, one row a sample, and X = U S V' its SVD, the leverage of a
sample x is the squared length of its row of U. But U = X V / S, and X'X = V S² V', so

    leverage(x) = || x V_r / S_r ||²        V, S² from the eigenvalues of  sum_k X_k' X_k

Every client can compute that of its own samples once it knows the sum of the d x d Gram matrices:
the same scores, and neither samples, features nor row counts leave a client.

The r largest directions only: with all of them, noisy features give every class its share of the
data; with as many as there are classes, every class about the same (docs/federated.md).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gram(features: Tensor) -> Tensor:
    """Return X'X in double precision: what a client adds to the sum."""
    wide = features.double()
    return wide.T @ wide


def whitening(gram: Tensor, rank: int) -> Tensor:
    """Return V_r / S_r of the sum of Gram matrices: d x r, or fewer columns if X has no more."""
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    real = values > cut(values, len(gram))
    scaled: Tensor = vectors[:, real] / values[real].sqrt()
    return scaled


def leverage(features: Tensor, whitening: Tensor) -> Tensor:
    """Return the score of each row: at most 1, and over all clients they add up to the rank."""
    return (features.double() @ whitening).square().sum(dim=1)


def cut(squares: Tensor, width: int) -> float:
    """Below this a squared singular value is rounding, and its direction is no direction."""
    return float(squares.max()) * width * torch.finfo(torch.float64).eps * 4
