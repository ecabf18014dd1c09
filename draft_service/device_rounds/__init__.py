"""Rounds that the devices of a target and a draft run by themselves, through a mailbox.

The target's device posts what it accepted; the draft's device extends that, grows the next trees
and posts these, while the messages of both hosts are still on their way. Nothing imports this
package but the engine factory: without it every path comes with an order.
"""
