"""Handwritten digits: a data set that is learnt in seconds and needs no download.

1,797 grey images of 8x8 pixels; data/digits.txt says where they come from.
"""

from __future__ import annotations

import csv
import gzip
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

_BRIGHTEST = 16
_TEST_SHARE = 0.2


def load() -> tuple[Tensor, Tensor]:
    """Return the images, float32 from 0 to 1 of shape (1797, 64), and the labels, int64."""
    images, labels = _parsed()
    return images.clone(), labels.clone()


def split(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train_x, train_y, test_x, test_y: 80 % and 20 %, shuffled by `seed` alone."""
    images, labels = _parsed()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([round(_TEST_SHARE * len(labels))])
    return images[train], labels[train], images[test], labels[test]


@cache  # thousands of virtual workers load it in one process
def _parsed() -> tuple[Tensor, Tensor]:
    packed = (files(__package__) / "data" / "digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode("ascii").splitlines()
    rows = torch.tensor([[int(float(value)) for value in row] for row in csv.reader(lines)])
    return rows[:, :-1].float() / _BRIGHTEST, rows[:, -1].clone()
