"""What drafts attach to: a ring of feature rows, a socket on this host, a port for other hosts."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from shared.config import PEERS, Secret, TargetConfig, read_secret
from shared.config.exposure import is_loopback
from shared.errors import ConfigError
from shared.peer.channel import PeerChannels, PeerListener, remove_stale_sockets
from shared.peer.ring import FeatureRing
from shared.peer.shared_files import MAILBOXES, RINGS
from shared.peer.tcp import TcpListener

logger = logging.getLogger(__name__)

# Steps whose rows a feature ring holds, if it may be as large as that.
RING_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEndpoints:
    """What there is to attach to; None: not that.

    Args:
        ring: Where features lie for drafts on this host.
        listener: Of drafts on this host.
        tcp_listener: Of drafts on other hosts.
    """

    ring: FeatureRing | None
    listener: PeerListener | None
    tcp_listener: TcpListener | None

    @classmethod
    def open(cls, config: TargetConfig, secret: Secret, step_bytes: int) -> DraftEndpoints:
        """Open what a configuration wants, as far as the machine has it.

        Args:
            step_bytes: Most bytes of feature rows that one step computes.
        Raises: ConfigError if the address for other hosts cannot be listened on.
        """
        return cls(
            ring=open_ring(config, step_bytes),
            listener=open_listener(config),
            tcp_listener=open_tcp_listener(config, secret),
        )

    def channels(self) -> PeerChannels:
        """Return the channels of the drafts that will attach."""
        listeners = (self.listener, self.tcp_listener)
        return PeerChannels(*[one for one in listeners if one is not None])


def require_secret(config: TargetConfig) -> Secret:
    """Return the secret of the deployment; falsy: none was given.

    Raises: ConfigError if others than this host can connect, and there is none.
    """
    secret = read_secret(config, os.environ)
    if config.peer_host and not secret and not is_loopback(config.peer_host):
        raise ConfigError(
            f"--peer-host {config.peer_host} needs a secret: give target and draft the same "
            "--secret-file, or bind it to 127.0.0.1"
        )
    return secret


def open_ring(config: TargetConfig, step_bytes: int) -> FeatureRing | None:
    """Create the feature ring; None where there is none to be had, or nothing to put into it.

    Args:
        step_bytes: Most bytes of feature rows that one step computes.
    """
    if not step_bytes or not config.feature_ring_mb:
        return None
    RINGS.remove_stale()
    num_bytes = min(RING_STEPS * step_bytes, config.feature_ring_mb << 20)
    try:
        ring = FeatureRing(num_bytes)
    except OSError as error:
        logger.warning("no feature ring, features go as bytes: %s", error)
        return None
    logger.info("feature ring: %.1f MiB of shared memory", ring.capacity / (1 << 20))
    return ring


def open_listener(config: TargetConfig) -> PeerListener | None:
    """Create the socket where drafts on this host attach; None if there is nothing to share."""
    if not (config.peer_socket and _has_peers(config)):
        return None
    try:
        remove_stale_sockets()
        MAILBOXES.remove_stale()
        return PeerListener()
    except OSError as error:
        logger.warning("trees go through the orchestrator: no socket for peer channels: %s", error)
        return None


def open_tcp_listener(config: TargetConfig, secret: Secret) -> TcpListener | None:
    """Listen for drafts on other hosts; None if that is not wanted.

    Raises: ConfigError if the address cannot be listened on.
    """
    if not (config.peer_host and _has_peers(config)):
        return None
    try:
        listener = TcpListener(config.peer_host, config.peer_port, secret.keys(PEERS))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --peer-host {config.peer_host} --peer-port {config.peer_port}: "
            f"{error.strerror}; choose another port, or 0 for any"
        ) from error
    logger.info("drafts on other hosts attach at port %d", listener.port)
    return listener


def _has_peers(config: TargetConfig) -> bool:
    return config.peer_rounds and "none" not in (config.algorithm, config.draft_model)
