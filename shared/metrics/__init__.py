"""What processes count, and how Prometheus reads it.

tally.py       counts that cost next to nothing, added to where things happen
samples.py     named values: what a count is called, with its labels
catalog.py     every metric: name, kind, labels, meaning
exposition.py  samples as Prometheus reads them
server.py      /metrics over HTTP, in the event loop of its process

Nothing here is asked before somebody reads: collecting is the reader's cost, not a step's.
"""
