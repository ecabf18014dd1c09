"""Options of every port: who may call, what is encrypted, and what is shown to whom is called."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.option import option

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class PortConfig:
    """What every service listens with."""

    host: str = option(
        LOOPBACK,
        "address to listen on; beyond loopback callers must prove who they are",
    )
    port: int = option(0, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    health_port: int = option(
        0,
        "port that answers health checks alone, in plain text, for probes that speak no TLS; 0 = "
        "none: --port answers them too",
        minimum=0,
        maximum=65535,
    )
    insecure: bool = option(
        default=False,
        help="listen beyond loopback even if anybody may call",
    )
    reflection: bool = option(default=True, help="tell callers the methods and their messages")
    secret_file: str = option(
        "",
        "file with the secret of the deployment, the same on orchestrator and workers: who calls a "
        "worker proves it; empty = the variable COPPICE_SECRET, or no secret",
    )
    tls_cert_file: str = option(
        "", "certificate chain (PEM) of this service; set = TLS; read again when it changes"
    )
    tls_key_file: str = option("", "private key (PEM) of --tls-cert-file")
    tls_client_ca_file: str = option(
        "", "authorities (PEM) that certificates of callers must come from; set = mutual TLS"
    )


@dataclass(frozen=True, kw_only=True)
class DialConfig:
    """What a service shows to those that it calls, and expects of them."""

    tls_ca_file: str = option(
        "",
        "authorities (PEM) that certificates of those it dials must come from; set = TLS to them",
    )
    tls_client_cert_file: str = option(
        "", "certificate chain (PEM) shown to those it dials; empty = --tls-cert-file"
    )
    tls_client_key_file: str = option(
        "", "private key (PEM) of --tls-client-cert-file; empty = --tls-key-file"
    )
    tls_server_name: str = option(
        "", "name in their certificates; empty = the host that is dialled, as configured"
    )
