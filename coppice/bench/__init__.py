"""Measure a running server with requests as users send them; what `coppice bench` runs.

schedule   who arrives when: read from a file, Poisson, or all at once
clients    processes that send the arrivals and note when what came back
request    one request as its client saw it
figures    requests -> quantiles, goodput, medians and spreads of repeats
measure    a run: warm-up, arrivals, figures; closed loop and open loop
outputs    digests of what came out, and whether they are the same
workers    counters of the server's workers
compare    two results side by side
plot       a line per way to speculate
"""
