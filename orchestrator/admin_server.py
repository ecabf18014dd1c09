"""The server of operators: a port of its own, and with several processes a socket for each."""

from __future__ import annotations

import logging

from coppice.v1 import admin_pb2_grpc
from orchestrator.admin import AdminService
from orchestrator.siblings import Siblings
from shared.config import OrchestratorConfig, admin_port
from shared.errors import ConfigError
from shared.rpc.gate import admin_gate
from shared.rpc.health_names import ADMIN_SERVICE
from shared.rpc.server import RpcServer

logger = logging.getLogger(__name__)


class AdminServer:
    """Serves operators as long as the process runs, also while it drains.

    Args:
        siblings: Processes that share the port; None: there are none.
    Raises: ConfigError if other hosts could call and operators need not say who they are.
    """

    def __init__(
        self, config: OrchestratorConfig, service: AdminService, siblings: Siblings | None
    ) -> None:
        self._config = config
        self._gate = admin_gate(config)
        self._service = service
        self._siblings = siblings
        self._server: RpcServer | None = None

    async def start(self) -> int:
        """Listen, unless the configuration says not to.

        Returns: the port; -1: operators are not served.
        Raises: ConfigError if somebody else has the port that was asked for.
        """
        port = admin_port(self._config)
        if port < 0:
            return port
        try:
            self._server = await self._serve(port)
        except ConfigError as error:
            if self._config.admin_port:
                raise ConfigError(f"--admin-port: {error}") from None
            self._server = await self._serve(0)
        logger.info("operators are served on %s", self._server.address)
        return self._server.port

    async def stop(self) -> None:
        """Stop at once."""
        if self._server is not None:
            await self._server.stop(grace_s=0)

    async def _serve(self, port: int) -> RpcServer:
        """Listen on a port."""
        server = RpcServer(
            services=[ADMIN_SERVICE],
            host=self._config.admin_host,
            port=port,
            shares_port=self._siblings is not None,
            gate=self._gate,
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._service, server.grpc_server)
        if self._siblings is not None:
            server.grpc_server.add_insecure_port(self._siblings.address)
        await server.start()
        await server.set_ready(ready=True)
        return server
