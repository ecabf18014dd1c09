"""Independent references: simple, dense, unpaged, slow, obviously right.

Written from the checkpoint formats and papers with plain torch. Nothing here imports the code under
test. Every forward recomputes its whole sequence; every tree node is drafted on its own.
"""
