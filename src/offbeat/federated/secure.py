"""Pairwise masks that cancel in the sum: nobody sees one client's numbers, only everybody's.

Bonawitz et al., CCS 2017: "Practical Secure Aggregation for Privacy-Preserving Machine Learning";
its masks, without its secret shares.

    every two clients i < j:  key_ij <- HKDF(X25519(private_i, public_j))      once
    in every sum:             m_ij <- ChaCha20(HKDF(key_ij, number of the sum))
    client i gives            x_i + sum over j > i of m_ij - sum over j < i of m_ji      mod 2^64
    the sum over clients is   the sum of x_i: every mask is in it once with each sign

Numbers are fixed-point integers of 64 bits, so that masks cancel to the bit, and each is uniform:
one client's upload says nothing without the keys. A key stream is used once.

Differs from the paper: nobody's masks can be taken back if it is lost in the middle of a sum. Then
the survivors make the sum again, with new keys: see client.py. Keys are not signed: see
docs/federated.md for what that leaves open. Needs the package `cryptography`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_KEY_BYTES = 32
_PURPOSE = b"offbeat.federated pairwise mask 1"


def check_installed() -> None:
    """Raise ImportError, with what to do, unless there is a library for the keys."""
    if find_spec("cryptography") is None:
        raise ImportError(
            "secure sums need the package cryptography: pip install 'offbeat[federated]', "
            "or learn with secure=False"
        )


class Masks:
    """One client's keys with each of the others, and the masks that they give."""

    def __init__(self, rank: int) -> None:
        check_installed()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._rank = rank
        self._private: Any = X25519PrivateKey.generate()
        self._shared: dict[int, bytes] = {}

    @property
    def public(self) -> bytes:
        """What the others need to know: 32 bytes."""
        key: bytes = self._private.public_key().public_bytes_raw()
        return key

    def meet(self, publics: Mapping[int, bytes]) -> None:
        """Agree on a key with each of these clients, but for oneself."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        for rank, public in publics.items():
            if rank != self._rank:
                other = X25519PublicKey.from_public_bytes(public)
                self._shared[rank] = self._private.exchange(other)

    def mask(self, number: int, count: int) -> Tensor:
        """Return what to add in the sum of this number: so many integers, modulo 2^64."""
        total = torch.zeros(count, dtype=torch.int64)
        for rank, secret in self._shared.items():
            first, last = sorted((self._rank, rank))
            stream = _stream(secret, first, last, number, count)
            total = total + stream if rank == last else total - stream
        return total


def _stream(secret: bytes, first: int, last: int, number: int, count: int) -> Tensor:
    """Uniform integers of 64 bits that only two clients know."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"|".join([_PURPOSE, *(str(each).encode() for each in (first, last, number))])
    key = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(secret)
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()  # a key is used once
    return torch.frombuffer(bytearray(cipher.update(bytes(8 * count))), dtype=torch.int64)
