"""Reverse proxies before the gateway: whose `X-Forwarded-For` says who the client is."""

from __future__ import annotations

import ipaddress

from shared.errors import ConfigError

_MAPPED = "::ffff:"
_MAPPED_BITS = 96


class TrustedProxies:
    """Addresses of proxies, by networks.

    Args:
        text: Addresses and networks with commas between them; "": nobody is trusted.
    Raises: ConfigError if one is neither.
    """

    def __init__(self, text: str) -> None:
        self.networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for part in filter(None, map(str.strip, text.split(","))):
            try:
                network = ipaddress.ip_network(part, strict=False)
            except ValueError:
                raise ConfigError(
                    f"--trusted-proxies has {part!r}, which is no address and no network such as "
                    "10.0.0.0/8"
                ) from None
            self.networks.append(network)
            if network.version == 4:  # as a socket for both versions shows it
                mapped = f"{_MAPPED}{network.network_address}/{_MAPPED_BITS + network.prefixlen}"
                self.networks.append(ipaddress.ip_network(mapped))

    def __bool__(self) -> bool:
        return bool(self.networks)

    def __contains__(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self.networks)

    @property
    def names(self) -> list[str]:
        """Return the networks as text."""
        return list(map(str, self.networks))
