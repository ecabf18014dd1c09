"""The tree budget of a target: which tree each request gets in the next rounds, or no tree, so that
all requests together get the most tokens per second. docs/budgets.md explains the method.

    shapes.py         BudgetedShapes: what the engine calls; turns requests and steps into arrays
    budget.py         TreeBudget: decides every few rounds; what lasts from one decision to the next
    deal.py           Dealer: the best trees for one round, given gains and costs
    acceptance.py     Acceptance: expected tokens of a round, learned from accepted drafts
    costs.py          RoundCosts: expected time of a round, learned from times of rounds
    samples.py        RoundSamples: the measured times that RoundCosts learns from
    round_timer.py    RoundTimer: how long a round of all requests took
    prompt_rounds.py  PromptRounds: how many rounds share their step with rows of prompts
    missed.py         what it takes to wake requests: the feature rows that drafts have missed
    probe.py          Probe: who gets trees on trial, and when, while all requests rest
"""
