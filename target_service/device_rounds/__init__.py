"""Device rounds: the GPUs of target and draft exchange paths and trees; hosts follow and confirm.

Only the engine_factory imports this package, when there is a mailbox. Without it there are relayed
and peer rounds.
"""
