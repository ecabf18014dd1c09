"""All of Coppice on this machine: targets, drafts and the orchestrator as child processes."""

from coppice.stack.config import StackConfig
from coppice.stack.process import ServiceFailedError, ServiceState
from coppice.stack.stack import Stack

__all__ = ["ServiceFailedError", "ServiceState", "Stack", "StackConfig"]
