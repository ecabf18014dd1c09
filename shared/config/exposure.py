"""Refuse to listen where anybody could call; needs no socket and no certificate."""

from __future__ import annotations

import ipaddress

from shared.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether nothing but this host can reach what listens at a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(
    host: str, *, is_insecure: bool, has_identity: bool, fix: str, option: str = "--host"
) -> None:
    """Raise unless callers prove who they are, or nobody but this host can call.

    Args:
        has_identity: Callers are asked who they are.
        fix: What to give to have that, with the flags.
        option: Of the host.
    Raises: ConfigError that names the flags.
    """
    if is_insecure or has_identity or is_loopback(host):
        return
    raise ConfigError(
        f"{option} {host or repr('')} can be reached from other hosts, and whoever calls need not "
        f"say who it is: give {fix}, or listen on {option} 127.0.0.1; --insecure lets anybody call"
    )
