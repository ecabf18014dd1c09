"""Device rounds: the GPUs of target and draft exchange paths and trees; hosts follow and confirm.

Only engine_factory.py imports this package, if there is a mailbox. Without this package all rounds
are relayed and peer rounds.
"""
