"""How the engines of a target and a draft prove to each other, over TCP, that they share a secret.

    draft  -> target    MAGIC, the token of the target that it looks for, a nonce
    target -> draft     a nonce, the target's proof
    draft  -> target    the draft's proof; frames follow at once

A proof is the HMAC-SHA256, by a key that is derived from the secret, of who proves it, the token
and both nonces: it cannot be replayed, nor sent back to its maker. Each end proves with its first
key and accepts all of them, so that a secret can be replaced. The target proves first, so a draft
tells nothing to whoever does not know the secret, and it is the draft that notices if the secrets
differ.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Sequence

TOKEN_BYTES = 16
_MAGIC = b"coppice peer v2\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_TARGET, _DRAFT = b"target", b"draft\0"


class HandshakeError(Exception):
    """The other end did not prove that it is the right one; the message says what it did."""


async def prove_draft(sock: socket.socket, *, keys: Sequence[bytes], token: bytes) -> None:
    """Check that a target's end knows the secret, and prove it in turn.

    Args:
        sock: Connected; does not block.
        keys: At least one.
        token: Of the target that is looked for.
    Raises: HandshakeError or OSError.
    """
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(sock, _MAGIC + token + nonce)
    answer = await _receive(
        sock,
        _NONCE_BYTES + _PROOF_BYTES,
        "it hung up: it is another target by now, or none",
    )
    nonces = nonce + answer[:_NONCE_BYTES]
    if not _is_proven(answer[_NONCE_BYTES:], keys, _TARGET + token + nonces):
        raise HandshakeError("it has another secret, or none; give both workers the same one")
    await loop.sock_sendall(sock, _proof(keys[0], _DRAFT + token + nonces))


async def prove_target(sock: socket.socket, *, keys: Sequence[bytes], token: bytes) -> None:
    """Prove to whoever has connected that this end knows the secret, and check that it does too.

    Args:
        sock: Does not block.
        keys: At least one.
        token: Of this target.
    Raises: HandshakeError or OSError.
    """
    loop = asyncio.get_running_loop()
    magic = await _receive(sock, len(_MAGIC), "it said nothing")
    if magic != _MAGIC:
        raise HandshakeError("it is no draft of this version")
    hello = await _receive(sock, TOKEN_BYTES + _NONCE_BYTES, "it hung up in the middle")
    if not hmac.compare_digest(hello[:TOKEN_BYTES], token):
        raise HandshakeError("it looks for another target")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = hello[TOKEN_BYTES:] + nonce
    await loop.sock_sendall(sock, nonce + _proof(keys[0], _TARGET + token + nonces))
    proof = await _receive(
        sock, _PROOF_BYTES, "it has another secret, or none; give both workers the same one"
    )
    if not _is_proven(proof, keys, _DRAFT + token + nonces):
        raise HandshakeError("it does not know the secret")


def _is_proven(proof: bytes, keys: Sequence[bytes], what: bytes) -> bool:
    matches = [hmac.compare_digest(proof, _proof(key, what)) for key in keys]
    return any(matches)


def _proof(key: bytes, what: bytes) -> bytes:
    return hmac.digest(key, _MAGIC + what, "sha256")


async def _receive(sock: socket.socket, num_bytes: int, if_it_ends: str) -> bytes:
    """Return exactly so many bytes: what follows them is not the handshake's.

    Raises: HandshakeError, in these words, if the other end closes before.
    """
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < num_bytes:
        data = await loop.sock_recv(sock, num_bytes - len(received))
        if not data:
            raise HandshakeError(if_it_ends)
        received += data
    return received
