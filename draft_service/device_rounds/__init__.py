"""Device rounds: the GPUs of target and draft exchange paths and trees through a mailbox.

The target's device posts accepted paths. The draft's device extends them, grows the next trees and
posts these, while the messages between the hosts are still on their way. Only engine_factory.py
imports this package: without it every path comes with an order from the target's host.
"""
