"""Budgets: how large a tree each request gets in the next round, or none, for the most tokens per
second of all requests together. `TreeBudget` decides, docs/budgets.md says how.
"""
